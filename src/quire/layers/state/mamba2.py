"""Mamba-2 (arXiv:2405.21060): a state space with one decay per head, which is linear attention.

B is the key, C the query, and x times the time step the value; the log decay is A times the time step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.kernels.state.rows import StateRows
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mixer_params import StateSpaceParams
from quire.layers.state.mixer import MixerPlace, StateMixer, load_fp32, load_taps
from quire.layers.state.ops import pick_ops


class Mamba2(StateMixer):
    """Convolved x, B and C, the state space, and a gate with or without a norm."""

    def __init__(self, env: Env, params: StateSpaceParams, place: MixerPlace) -> None:
        prefix, parallel = place.prefix, env.parallel
        self.params, self.ops, self.parallel, self.eps = params, pick_ops(env), parallel, params.eps
        self.heads, self.groups = parallel.share(params.heads), parallel.share(params.groups)
        inner, shared = params.inner, params.groups * params.state_dim
        units = [params.heads, params.heads, params.groups, params.groups, params.heads]
        sizes = [inner, inner, shared, shared, params.heads]
        project = Linear(
            env, prefix + "in_proj", place.hidden, sizes, params.proj_bias, cut="rows", units=units
        )
        output = Linear(env, prefix + "out_proj", inner, place.hidden, params.out_bias, cut="cols")
        self.held = [size // count * parallel.share(count) for size, count in zip(sizes, units)]
        self.sizes = [self.held[0], sum(self.held[1:4]), self.held[4]]
        super().__init__(place, project, self.sizes, output)
        self.taps, self.bias = load_taps(
            env, prefix + "conv1d", params.width, sizes[1:4], units[1:4], params.conv_bias
        )
        self.decay = -load_fp32(env, prefix + "A_log", params.heads).exp()
        self.skip = load_fp32(env, prefix + "D", params.heads)[:, None]
        self.step_bias = load_fp32(env, prefix + "dt_bias", params.heads)
        self.norm_weight = (
            load_fp32(env, prefix + "norm.weight", inner, params.heads) if params.norm else None
        )
        self.scales = _scales(params, self.held, env)

    def mix(
        self, parts: Sequence[torch.Tensor], state: tuple[torch.Tensor, ...], rows: StateRows
    ) -> torch.Tensor:
        params, held = self.params, self.held
        if self.scales is not None:
            parts = [part * scale for part, scale in zip(parts, self.scales.split(self.sizes), strict=True)]
        gate, xbc, step = parts
        xbc = self.ops.conv(xbc, self.taps, self.bias, state[0], rows, "silu")
        x, b, c = xbc.split(held[1:4], 1)
        x = x.unflatten(1, (self.heads, params.head_dim))
        step = F.softplus(step.float() + self.step_bias).clamp(*params.step_limits)
        read = self.ops.recurrence(
            c.unflatten(1, (self.groups, params.state_dim)),
            b.unflatten(1, (self.groups, params.state_dim)),
            (x * step[..., None]).to(x.dtype),
            step * self.decay,
            None,
            state[1],
            rows,
        )
        return self.finish((read + x * self.skip).flatten(1), gate.float()).to(gate.dtype)

    def finish(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Apply the gate, and the norm behind it or in front of it; all [tokens, heads * head dim] in fp32."""
        gate = F.silu(gate)
        if self.norm_weight is None:
            return y * gate
        return self.normed(y * gate) if self.params.norm == "behind" else self.normed(y) * gate

    def normed(self, y: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of each group of heads; several ranks may share a group."""
        assert self.norm_weight is not None
        by_group = y.unflatten(1, (self.groups, -1))
        squares = by_group.square().sum(-1, keepdim=True)
        width = by_group.shape[-1]
        if (sharers := self.parallel.size * self.groups // self.params.groups) > 1:
            squares, width = self.shared_sum(squares, sharers), width * sharers
        return (by_group * torch.rsqrt(squares / width + self.eps)).flatten(1) * self.norm_weight

    def shared_sum(self, squares: torch.Tensor, sharers: int) -> torch.Tensor:
        """Return the sums of squares [tokens, 1, 1] over the `sharers` ranks that hold parts of the same group."""
        slots = squares.new_zeros(squares.shape[0], self.params.groups)
        slots[:, self.parallel.rank // sharers] = squares[:, 0, 0]
        return self.parallel.all_reduce(slots)[:, self.parallel.rank // sharers, None, None]


def _scales(params: StateSpaceParams, held: list[int], env: Env) -> torch.Tensor | None:
    """Return a factor per projected number, or None if all are 1."""
    if set(params.scales) == {1.0}:
        return None
    scales = torch.cat([torch.full((size,), scale) for size, scale in zip(held, params.scales, strict=True)])
    return scales.to(env.device, env.dtype)
