"""Gated DeltaNet (arXiv:2412.06464), the mixer of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.state.rows import StateRows
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mixer_params import DeltaParams
from quire.layers.state.mixer import MixerPlace, StateMixer, load_fp32, load_taps
from quire.layers.state.ops import pick_ops
from quire.quant.base import Part, RoundedRows
from quire.quant.forms import FP8_BLOCK


class GatedDeltaNet(StateMixer):
    """Convolved queries, keys and values, the gated delta rule, and a gated norm of each head."""

    def __init__(self, env: Env, params: DeltaParams, place: MixerPlace) -> None:
        prefix, parallel = place.prefix, env.parallel
        self.params, self.ops = params, pick_ops(env)
        self.keys, self.heads = parallel.share(params.key_heads), parallel.share(params.value_heads)
        make_parts = _grouped_parts if params.stored == "grouped" else _split_parts
        project = Linear.from_parts(env, make_parts(env, params, prefix, place.hidden))
        values = params.value_heads * params.value_dim
        key_width, value_width = self.keys * params.key_dim, self.heads * params.value_dim
        self.qkv_sizes = [key_width, key_width, value_width]
        sizes = [2 * key_width + value_width, value_width, self.heads, self.heads]
        output = Linear(env, prefix + "out_proj", values, place.hidden, cut="cols")
        super().__init__(place, project, sizes, output)
        keys, units = params.key_heads * params.key_dim, params.key_heads
        channels = [keys, keys, values]
        self.taps, _ = load_taps(env, prefix + "conv1d", params.width, channels, [units] * 3, bias=False)
        self.rate = load_fp32(env, prefix + "A_log", params.value_heads, units).exp()
        self.step_bias = load_fp32(env, prefix + "dt_bias", params.value_heads, units)
        weight = env.weights.tensor(prefix + "norm.weight", (params.value_dim,))
        self.norm_weight, self.eps = weight.to(env.device, torch.float32), place.eps
        # Few rows of one token take one kernel, if there is one.
        self.step = self.ops.delta_step(
            self.keys, params.key_dim, self.heads, params.value_dim, self.taps, self.rate, self.step_bias,
            self.norm_weight, self.eps,
        )  # fmt: skip

    def mix(
        self, parts: Sequence[torch.Tensor], state: tuple[torch.Tensor, ...], rows: StateRows
    ) -> torch.Tensor | RoundedRows:
        params, (qkv, z, b, a) = self.params, parts
        if self.step is not None and self.step.takes(rows):
            window, matrices = state
            return self.step(qkv, z, b, a, window, matrices, rows)
        qkv = self.ops.conv(qkv, self.taps, None, state[0], rows, "silu")
        q, k, v = qkv.split(self.qkv_sizes, 1)
        decay, beta = self.ops.gates(a, b, self.rate, self.step_bias)
        read = self.ops.recurrence(
            q.unflatten(1, (self.keys, params.key_dim)),
            k.unflatten(1, (self.keys, params.key_dim)),
            v.unflatten(1, (self.heads, params.value_dim)),
            decay,
            beta,
            state[1],
            rows,
            params.key_dim**-0.5,
            True,
        )
        z = z.unflatten(1, (self.heads, -1))
        order = None if self.is_last else self.output.scale_order(len(read))
        if order and params.value_dim == FP8_BLOCK:  # the columns of a head have a scale of their own
            codes, scales = self.ops.rounded_norm(read, z, self.norm_weight, self.eps, order == "columns")
            return RoundedRows(codes.flatten(1), scales, read.dtype)
        return self.ops.gated_norm(read, z, self.norm_weight, self.eps).flatten(1)


def _grouped_parts(env: Env, params: DeltaParams, prefix: str, hidden: int) -> list[Part]:
    """Return the rows of this rank in the order q, k, v, z, b, a; Qwen3-Next stores them by key head."""
    ratio = params.value_heads // params.key_heads
    wide, narrow = ratio * params.value_dim, ratio
    held = range(*env.parallel.cut(params.key_heads).indices(params.key_heads))

    def parts(name: str, sizes: list[int]) -> list[Part]:
        group, shape = sum(sizes), (params.key_heads * sum(sizes), hidden)
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Part(
                f"{prefix}{name}.weight",
                shape,
                slice(h * group + offset, h * group + offset + size),
                slice(0, hidden),
            )
            for offset, size in zip(offsets, sizes)
            for h in held
        ]

    by_head = [params.key_dim, params.key_dim, wide, wide]
    return parts("in_proj_qkvz", by_head) + parts("in_proj_ba", [narrow, narrow])


def _split_parts(env: Env, params: DeltaParams, prefix: str, hidden: int) -> list[Part]:
    """Return the rows of this rank in the order q, k, v, z, b, a; Qwen3.5 stores them in four tensors."""
    keys, values = params.key_heads * params.key_dim, params.value_heads * params.value_dim
    stored = {
        "in_proj_qkv": [keys, keys, values],
        "in_proj_z": [values],
        "in_proj_b": [params.value_heads],
        "in_proj_a": [params.value_heads],
    }
    parts = []
    for name, sizes in stored.items():
        first = 0
        for size in sizes:
            cut = env.parallel.cut(size, params.key_heads)
            rows = slice(first + cut.start, first + cut.stop)
            parts.append(Part(f"{prefix}{name}.weight", (sum(sizes), hidden), rows, slice(0, hidden)))
            first += size
    return parts
