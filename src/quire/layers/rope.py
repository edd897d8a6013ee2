"""Rotary position embeddings (RoFormer, arXiv:2104.09864), with the ways to stretch them.

All angles are computed once, in fp32, for every position that can occur. A step looks its positions up
once (`lookup`); each layer's `RotaryHeads` turns q and k by what was found. Both come in two forms,
chosen when they are built: by a kernel, which also does the norm of the heads, or by plain torch. Halves
are rotated against each other, not neighbouring pairs: so do Hugging Face checkpoints store q and k.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from quire.kernels import Kernels
from quire.layers.norm import HeadNorm
from quire.layers.rope_params import RopeParams

# One step's angles. Plain: cos and sin, each [tokens, 1, dim]. Fused: positions [tokens], the table.
Rotation = tuple[torch.Tensor, torch.Tensor]
_POSITIONS = 1 << 14  # whose angles are computed at once, in fp32
QKVHeads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, each [tokens, heads, dim]


class Rope:
    """cos and sin tables for `max_len` positions."""

    def __init__(
        self,
        params: RopeParams,
        dim: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
    ) -> None:
        frequencies = inverse_frequencies(params, dim).to(device)
        self.table = torch.empty(max_len, dim, dtype=dtype, device=device)  # cos | sin
        for begin in range(0, max_len, _POSITIONS):
            positions = torch.arange(
                begin, min(begin + _POSITIONS, max_len), dtype=torch.float32, device=device
            )
            angles = torch.outer(positions, frequencies)  # [positions, dim / 2]
            part = torch.cat((angles.cos(), angles.sin()), -1) * params.attention_factor
            self.table[begin : begin + _POSITIONS] = part
        # what RotaryHeads needs of a step's tokens; the kernel reads the table itself
        self.lookup = self._as_it_is if kernels else self._expanded

    def _as_it_is(self, positions: torch.Tensor) -> Rotation:
        return positions, self.table

    def _expanded(self, positions: torch.Tensor) -> Rotation:
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class RotaryHeads:
    """Packed q|k|v of one layer -> q and k, normed if the layer has a norm and rotated, and v.

    The result may be views of the argument, overwritten.
    """

    def __init__(
        self, heads: int, kv_heads: int, dim: int, norm: HeadNorm | None, kernels: Kernels | None = None
    ) -> None:
        self.dim = dim
        self.sizes = [heads, kv_heads, kv_heads]
        self.turned = heads + kv_heads
        self.norm = norm
        self.turn = self._fused(kernels) if kernels else self._plain

    def __call__(self, qkv: torch.Tensor, rotation: Rotation) -> QKVHeads:
        return self.turn(qkv, rotation)  # [tokens, (heads + 2 kv heads) * dim]

    def _plain(self, qkv: torch.Tensor, rotation: Rotation) -> QKVHeads:
        heads, kv_heads, _ = self.sizes
        qk, v = qkv.view(qkv.shape[0], -1, self.dim).split([self.turned, kv_heads], 1)
        if self.norm is not None:
            qk = self.norm(qk)
        q, k = rotate(qk, rotation).split([heads, kv_heads], 1)
        return q, k, v

    def _fused(self, kernels: Kernels) -> Callable[[torch.Tensor, Rotation], QKVHeads]:
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

        def turn(qkv: torch.Tensor, rotation: Rotation) -> QKVHeads:
            kernels.norm_rotate_(qkv, *rotation, weight, eps, self.turned)
            q, k, v = qkv.view(qkv.shape[0], -1, self.dim).split(self.sizes, 1)
            return q, k, v

        return turn


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn each head of x [tokens, heads, dim]: (a, b) -> (a cos - b sin, b cos + a sin)."""
    cos, sin = rotation
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def inverse_frequencies(params: RopeParams, dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, [dim / 2].

    default: theta^(-2i/dim). linear: divided by the factor (arXiv:2306.15595). dynamic: default within
    the original context, which is all that is served. llama3: long waves divided by the factor, short
    ones kept, smooth between (Llama 3.1). yarn: the same idea over dimensions (arXiv:2309.00071).
    """
    plain = 1.0 / params.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if params.kind in ("default", "dynamic"):
        return plain
    if params.kind == "linear":
        return plain / params.factor
    if params.kind == "divisors":
        return plain / torch.tensor(params.divisors)
    if params.kind == "llama3":
        keep = _llama3_keep(params, plain)
    elif params.kind == "yarn":
        keep = _yarn_keep(params, dim)
    else:
        raise ValueError(f"unknown rope kind {params.kind!r}")
    return keep * plain + (1 - keep) * plain / params.factor


def _llama3_keep(params: RopeParams, plain: torch.Tensor) -> torch.Tensor:
    """1 for waves that fit high_freq_factor times into the original context, 0 below low_freq_factor times."""
    turns = params.original_max_len * plain / (2 * math.pi)
    low, high = params.low_freq_factor, params.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_keep(params: RopeParams, dim: int) -> torch.Tensor:
    """1 for dimensions that turn at least beta_fast times in the original context, 0 below beta_slow."""

    def dimension(turns: float) -> float:
        return dim * math.log(params.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(params.theta))

    low, high = dimension(params.beta_fast), dimension(params.beta_slow)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0, 1)
