"""Rotary position embeddings (RoFormer, arXiv:2104.09864) and the rules that extend their context.

The angles of all positions are computed once, in fp32. A step looks up its positions once (`Rope.lookup`), and
each layer's `RotaryHeads` rotates q and k by them: with a kernel that also norms the heads, or in plain PyTorch.

The two dimensions of a pair are `span` apart: half a head in most checkpoints, half of the rotated dimensions if only
the first ones are rotated, and 1 if neighbours form a pair. Dimensions that are not rotated form pairs with the angle
0, so every head has dim / 2 pairs, and kernels need no special case for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels import Kernels
from quire.layers.norm import HeadNorm
from quire.layers.rope_params import RopeParams

_POSITIONS = 1 << 14  # positions whose angles are computed at once; bounds the fp32 scratch memory
QKVHeads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, each [tokens, heads, dim]


class Rotation:
    """The angles of one step's tokens.

    Kernels read `positions` and `table`. Plain PyTorch reads `cos` and `sin`, which are gathered on first use and
    shared by all layers.
    """

    __slots__ = ("_cos", "_sin", "pairs", "positions", "table")

    def __init__(
        self, positions: torch.Tensor, table: torch.Tensor, pairs: RotaryPairs | None = None
    ) -> None:
        """Take `positions` int64 [tokens], the `table` [positions, dim] of cosines | sines, and the order of pairs.

        Without `pairs`, the two dimensions of a pair are half a head apart.
        """
        self.positions = positions
        self.table = table
        self.pairs = pairs
        self._cos: torch.Tensor | None = None
        self._sin: torch.Tensor | None = None

    def select(self, tokens: torch.Tensor | slice) -> Rotation:
        """Return the rotation of some of the step's tokens."""
        return Rotation(self.positions[tokens], self.table, self.pairs)

    @property
    def cos(self) -> torch.Tensor:
        """Return the cosines [tokens, 1, dim], the same for both dimensions of a pair."""
        if self._cos is None:
            self._gather()
        assert self._cos is not None
        return self._cos

    @property
    def sin(self) -> torch.Tensor:
        """Return the sines [tokens, 1, dim], negated for the first dimension of a pair."""
        if self._sin is None:
            self._gather()
        assert self._sin is not None
        return self._sin

    def _gather(self) -> None:
        cos, sin = self.table[self.positions].unsqueeze(1).chunk(2, -1)
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if self.pairs is not None:
            self._cos, self._sin = (x.index_select(-1, self.pairs.angle) for x in (self._cos, self._sin))


class RotaryPairs:
    """The order of pairs in a head, for plain PyTorch: two index tensors, int64 [dim].

    Attributes:
        angle: each dimension's place among all first, then all second dimensions of the pairs.
        partner: the other dimension of its pair.
    """

    def __init__(self, dim: int, span: int, device: torch.device) -> None:
        pair = torch.arange(dim // 2, device=device)
        if span == 1:
            first = 2 * pair
            second = first + 1
        else:  # the dimensions behind the rotated ones form pairs of halves, too
            rotated = pair < span
            first = torch.where(rotated, pair, pair + span)
            second = first + torch.where(rotated, span, dim // 2 - span)
        self.angle = torch.cat((first, second)).argsort()
        self.partner = torch.cat((second, first)).index_select(0, self.angle)


class Rope:
    """Table of the cosines and sines of `max_len` positions, [max_len, dim]: cos | sin."""

    def __init__(
        self, params: RopeParams, dim: int, max_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        frequencies = inverse_frequencies(params, dim, max_len).to(device)
        factor = torch.where(frequencies == 0, 1.0, params.attention_factor).repeat(2)
        span = params.span(dim)
        self.pairs = None if span == dim // 2 else RotaryPairs(dim, span, device)
        self.table = torch.empty(max_len, dim, dtype=dtype, device=device)
        for begin in range(0, max_len, _POSITIONS):
            positions = torch.arange(
                begin, min(begin + _POSITIONS, max_len), dtype=torch.float32, device=device
            )
            angles = torch.outer(positions, frequencies)  # [positions, dim / 2]
            part = torch.cat((angles.cos(), angles.sin()), -1) * factor
            self.table[begin : begin + _POSITIONS] = part

    def lookup(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of a step's `positions`, int64 [tokens]."""
        return Rotation(positions, self.table, self.pairs)


class RotaryHeads:
    """Layer step that splits packed q|k|v into heads, norms q and k if there is a norm, and rotates them.

    The results may be views of the argument, which is overwritten.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        norm: HeadNorm | None,
        kernels: Kernels | None = None,
        span: int = 0,
    ) -> None:
        self.dim = dim
        self.span = span
        self.sizes = [heads, kv_heads, kv_heads]
        self.num_rotated = heads + kv_heads
        self.norm = norm
        self.split = self._fused(kernels) if kernels else self._plain

    def __call__(self, qkv: torch.Tensor, rotation: Rotation) -> QKVHeads:
        """Return q, k and v as [tokens, heads, dim] from `qkv` [tokens, (heads + 2 kv heads) * dim]."""
        return self.split(qkv, rotation)

    def _plain(self, qkv: torch.Tensor, rotation: Rotation) -> QKVHeads:
        heads, kv_heads, _ = self.sizes
        qk, v = qkv.view(qkv.shape[0], -1, self.dim).split([self.num_rotated, kv_heads], 1)
        if self.norm is not None:
            qk = self.norm(qk)
        q, k = rotate(qk, rotation).split([heads, kv_heads], 1)
        return q, k, v

    def _fused(self, kernels: Kernels) -> Callable[[torch.Tensor, Rotation], QKVHeads]:
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

        def split(qkv: torch.Tensor, rotation: Rotation) -> QKVHeads:
            kernels.norm_rotate_(
                qkv, rotation.positions, rotation.table, weight, eps, self.num_rotated, self.span
            )
            q, k, v = qkv.view(qkv.shape[0], -1, self.dim).split(self.sizes, 1)
            return q, k, v

        return split


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate each head of x [tokens, heads, dim]: a pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    if rotation.pairs is None:
        return (x * rotation.cos).addcmul_(x.roll(x.shape[-1] // 2, -1), rotation.sin)
    return (x * rotation.cos).addcmul_(x.index_select(-1, rotation.pairs.partner), rotation.sin)


def inverse_frequencies(params: RopeParams, dim: int, served_len: int = 0) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32 [dim / 2]; 0 for those not rotated.

    The rules (`params.kind`):

    - default: theta^(-2i/dim).
    - linear: default divided by the factor (arXiv:2306.15595).
    - dynamic: default, because only the original context is served.
    - llama3: long waves divided by the factor, short ones kept, a ramp between them (Llama 3.1).
    - yarn: the same ramp over dimensions (arXiv:2309.00071).
    - divisors: default divided by a given number per dimension.
    - longrope: as divisors, with other numbers if more than the original context is served (arXiv:2402.13753).
    - none: no rotation.

    Args:
        params: base and rule.
        dim: head size.
        served_len: the longest context that is served, in tokens, which decides between the divisors of longrope.

    Raises:
        ValueError: if the kind is unknown.
    """
    if params.kind == "none":
        return torch.zeros(dim // 2)
    rotated = params.rotary_dim or dim
    return F.pad(_rotated_frequencies(params, rotated, served_len), (0, (dim - rotated) // 2))


def _rotated_frequencies(params: RopeParams, dim: int, served_len: int) -> torch.Tensor:
    plain = 1.0 / params.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if params.kind in ("default", "dynamic"):
        return plain
    if params.kind == "linear":
        return plain / params.factor
    if params.kind == "divisors":
        return plain / torch.tensor(params.divisors)
    if params.kind == "longrope":
        is_long = served_len > params.original_max_len
        return plain / torch.tensor(params.long_divisors if is_long else params.divisors)
    if params.kind == "llama3":
        keep = _llama3_keep(params, plain)
    elif params.kind == "yarn":
        keep = _yarn_keep(params, dim)
    else:
        raise ValueError(f"unknown rope kind {params.kind!r}")
    return keep * plain + (1 - keep) * plain / params.factor


def _llama3_keep(params: RopeParams, plain: torch.Tensor) -> torch.Tensor:
    """Return 1 for waves that fit `high_freq_factor` times into the original context, 0 below `low_freq_factor`."""
    turns = params.original_max_len * plain / (2 * math.pi)
    low, high = params.low_freq_factor, params.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_keep(params: RopeParams, dim: int) -> torch.Tensor:
    """Return 1 for dimensions that turn at least `beta_fast` times in the original context, 0 below `beta_slow`."""

    def dimension(turns: float) -> float:
        return dim * math.log(params.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(params.theta))

    low, high = dimension(params.beta_fast), dimension(params.beta_slow)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0, 1)
