"""Kimi delta attention (arXiv:2510.26692): the gated delta rule with a decay per channel of the key."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.state.rows import StateRows
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mixer_params import DeltaParams
from quire.layers.state.mixer import MixerPlace, StateMixer, load_fp32, load_taps
from quire.layers.state.ops import pick_ops


class KimiDeltaAttention(StateMixer):
    """Convolved queries, keys and values, the delta rule, and a gated norm of each head."""

    def __init__(self, env: Env, params: DeltaParams, place: MixerPlace) -> None:
        prefix, parallel, dim = place.prefix, env.parallel, params.key_dim
        heads, width, hidden = params.value_heads, params.value_heads * params.key_dim, place.hidden
        self.ops, self.dim, self.heads, self.eps = pick_ops(env), dim, parallel.share(heads), place.eps
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")]
        # The latents of the two gates are the same on all ranks, so each computes them whole.
        sizes, units = [width, width, width, heads, dim, dim], [heads, heads, heads, heads, 1, 1]
        project = Linear(env, names, hidden, sizes, cut="rows", units=units)
        held = [3 * self.heads * dim, self.heads, dim, dim]
        super().__init__(place, project, held, Linear(env, prefix + "o_proj", width, hidden, cut="cols"))
        self.forget = Linear(env, prefix + "f_b_proj", dim, width, cut="rows")
        self.gate = Linear(env, prefix + "g_b_proj", dim, width, cut="rows")
        taps = [
            load_taps(env, f"{prefix}{name}_conv1d", params.width, [width], [heads], bias=False)[0]
            for name in "qkv"
        ]
        self.taps = torch.cat(taps, 1)
        rate = env.weights.tensor(prefix + "A_log", (1, 1, heads, 1)).flatten()[parallel.cut(heads)]
        self.rate = rate.to(env.device, torch.float32).exp()
        self.step_bias = load_fp32(env, prefix + "dt_bias", width, heads)
        weight = env.weights.tensor(prefix + "o_norm.weight", (dim,))
        self.norm_weight = weight.to(env.device, torch.float32)

    def mix(
        self, parts: Sequence[torch.Tensor], state: tuple[torch.Tensor, ...], rows: StateRows
    ) -> torch.Tensor:
        qkv, beta, forget, gate = parts
        qkv = self.ops.conv(qkv, self.taps, None, state[0], rows, "silu")
        q, k, v = qkv.unflatten(1, (3, self.heads, self.dim)).unbind(1)
        decay, rate = self.ops.gates(self.forget(forget.contiguous()), beta, self.rate, self.step_bias)
        decay, scale = decay.unflatten(1, (self.heads, self.dim)), self.dim**-0.5
        read = self.ops.recurrence(q, k, v, decay, rate, state[1], rows, scale, True)
        gate = self.gate(gate.contiguous()).unflatten(1, (self.heads, self.dim))
        return self.ops.gated_norm(read, gate, self.norm_weight, self.eps, "sigmoid").flatten(1)
