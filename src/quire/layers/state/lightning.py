"""Lightning attention (arXiv:2401.04658), the mixer of MiniMax-01 (arXiv:2501.08313)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.state.rows import StateRows
from quire.layers.activation import ACTIVATIONS
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mixer_params import LightningParams
from quire.layers.state.mixer import MixerPlace, StateMixer, load_fp32
from quire.layers.state.ops import pick_ops
from quire.quant.base import Part


class LightningAttention(StateMixer):
    """Linear attention with a fixed decay per head, a norm of all heads together, and a gate."""

    def __init__(
        self, env: Env, params: LightningParams, place: MixerPlace, num_layers: int, activation: str
    ) -> None:
        prefix, heads, dim = place.prefix, params.heads, params.head_dim
        self.ops, self.parallel, self.dim = pick_ops(env), env.parallel, dim
        self.heads, self.activation = env.parallel.share(heads), ACTIVATIONS[activation]
        project = Linear.from_parts(env, _parts(env, prefix, heads, dim, place.hidden))
        output = Linear(env, prefix + "out_proj", heads * dim, place.hidden, cut="cols")
        super().__init__(place, project, [3 * self.heads * dim, self.heads * dim], output)
        held = env.parallel.cut(heads)
        number = torch.arange(held.start + 1, held.stop + 1, dtype=torch.float32)
        depth = 1 - place.index / (num_layers - 1 + 1e-5) + 1e-5
        self.decay = -((2 ** (-8 / heads)) ** number * depth).to(env.device)
        self.norm_weight = load_fp32(env, prefix + "norm.weight", heads * dim, heads)
        self.eps, self.width = params.eps, heads * dim

    def mix(
        self, parts: Sequence[torch.Tensor], state: tuple[torch.Tensor, ...], rows: StateRows
    ) -> torch.Tensor:
        qkv, gate = parts
        q, k, v = self.activation(qkv).unflatten(1, (3, self.heads, self.dim)).unbind(1)
        decay = self.decay.expand(len(q), -1)
        read = self.ops.recurrence(q, k, v, decay, None, state[0], rows).flatten(1).float()
        squares = self.parallel.all_reduce(read.square().sum(1, keepdim=True))
        normed = read * torch.rsqrt(squares / self.width + self.eps) * self.norm_weight
        return (normed * gate.float().sigmoid()).to(gate.dtype)


def _parts(env: Env, prefix: str, heads: int, dim: int, hidden: int) -> list[Part]:
    """Return the rows of this rank in the order q, k, v, gate; q, k and v are stored head by head."""
    held, every = range(*env.parallel.cut(heads).indices(heads)), slice(0, hidden)
    name, shape = prefix + "qkv_proj.weight", (3 * heads * dim, hidden)
    parts = [
        Part(name, shape, slice((3 * h + which) * dim, (3 * h + which + 1) * dim), every)
        for which in range(3)
        for h in held
    ]
    rows = env.parallel.cut(heads * dim, heads)
    return [*parts, Part(prefix + "output_gate.weight", (heads * dim, hidden), rows, every)]
