"""Mamba-1 (arXiv:2312.00752) with Jamba's norms of time step, B and C (arXiv:2403.19887)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.kernels.state.rows import StateRows
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mixer_params import SelectiveScanParams
from quire.layers.norm import RMSNorm
from quire.layers.state.mixer import MixerPlace, StateMixer, load_fp32, load_taps
from quire.layers.state.ops import pick_ops


class Mamba1(StateMixer):
    """Convolved x, the selective scan, and a gate."""

    def __init__(self, env: Env, params: SelectiveScanParams, place: MixerPlace) -> None:
        prefix, inner, bias = place.prefix, params.inner, params.proj_bias
        self.ops = pick_ops(env)
        project = Linear(env, prefix + "in_proj", place.hidden, [inner, inner], bias, cut="rows")
        output = Linear(env, prefix + "out_proj", inner, place.hidden, bias, cut="cols")
        super().__init__(place, project, [project.out_features // 2] * 2, output)
        self.sizes = [params.rank, params.state_dim, params.state_dim]
        self.select = Linear(env, prefix + "x_proj", inner, sum(self.sizes), cut="cols")
        names = ("dt_layernorm", "b_layernorm", "c_layernorm")
        self.norms = [RMSNorm(env, prefix + name, size, place.eps) for name, size in zip(names, self.sizes)]
        self.step = Linear(env, prefix + "dt_proj", params.rank, inner, cut="rows")
        self.step_bias = load_fp32(env, prefix + "dt_proj.bias", inner)
        self.taps, self.bias = load_taps(
            env, prefix + "conv1d", params.width, [inner], [inner], params.conv_bias
        )
        rows = env.parallel.cut(inner)
        stored = env.weights.tensor(prefix + "A_log", (inner, params.state_dim), rows)
        self.decay = -stored.to(env.device, torch.float32).exp()
        self.skip = load_fp32(env, prefix + "D", inner)

    def mix(
        self, parts: Sequence[torch.Tensor], state: tuple[torch.Tensor, ...], rows: StateRows
    ) -> torch.Tensor:
        x, gate = parts
        x = self.ops.conv(x, self.taps, self.bias, state[0], rows, "silu")
        selected = self.select(x).split(self.sizes, 1)
        low_rank, b, c = (norm.alone(part.contiguous()) for norm, part in zip(self.norms, selected))
        step = F.softplus(self.step(low_rank).float() + self.step_bias)
        return self.ops.scan(x, step, self.decay, b, c, self.skip, state[1], rows) * F.silu(gate)
