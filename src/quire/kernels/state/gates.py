"""Gates of delta-rule layers and the norm behind them, one kernel each; layers/state/gates.py defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.matmul.round_fp8 import GROUP, LARGEST, TINY, round_groups

_BLOCK = 256  # channels of a program
_NUMBERS = 2048  # of a program of the norm


@kernel
def _gates(
    a,  # [tokens, channels], row stride a_token
    b,  # [tokens, heads], row stride b_token
    rate,  # float32 [heads]
    bias,  # float32 [channels]
    decay,  # float32 [tokens, channels]
    beta,  # float32 [tokens, heads]
    channels,
    heads,
    a_token,
    b_token,
    WIDTH: tl.constexpr,  # channels per head
    BLOCK: tl.constexpr,
) -> None:
    """Grid (tokens, tiles of channels)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    x = tl.load(a + token * a_token + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + at, mask=inside, other=0.0)
    step = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    scale = tl.load(rate + at // WIDTH, mask=inside, other=0.0)
    tl.store(decay + token * channels + at, -scale * step, mask=inside)
    y = tl.load(b + token * b_token + at, mask=at < heads, other=0.0).to(tl.float32)
    tl.store(beta + token * heads + at, tl.sigmoid(y), mask=at < heads)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decays and rates, as layers/state/gates.py does."""
    (tokens, channels), heads = a.shape, b.shape[1]
    assert a.stride(1) == 1 and b.stride(1) == 1
    decay = torch.empty(tokens, channels, device=a.device, dtype=torch.float32)
    beta = torch.empty(tokens, heads, device=a.device, dtype=torch.float32)
    block = min(_BLOCK, triton.next_power_of_2(channels))
    _gates[(tokens, triton.cdiv(channels, block))](
        a, b, rate, bias, decay, beta, channels, heads, a.stride(0), b.stride(0), WIDTH=channels // heads,
        BLOCK=block, num_warps=1 if block <= 64 else 4,
    )  # fmt: skip
    return decay, beta


@kernel
def _norm_and_gate(
    x,  # [tokens, HEADS, WIDTH], contiguous
    gate,  # [tokens, HEADS, WIDTH], row stride gate_token
    weight,  # float32 [WIDTH]
    out,  # [tokens, HEADS, WIDTH], contiguous; e4m3 with ROUND
    scales,  # float32 [tokens, HEADS], with BY_COLUMN [HEADS, tokens], if ROUND
    vectors,  # tokens * HEADS
    gate_token,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    ROUND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
) -> None:
    """Grid (tiles of vectors)."""
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = vector // HEADS, vector % HEADS
    at = tl.arange(0, WIDTH_PAD)
    inside = (vector < vectors)[:, None] & (at < WIDTH)[None, :]
    own = vector.to(tl.int64)[:, None] * WIDTH + at[None, :]
    value = tl.load(x + own, mask=inside, other=0.0).to(tl.float32)
    place = (token.to(tl.int64) * gate_token + head * WIDTH)[:, None] + at[None, :]
    factor = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=at < WIDTH, other=0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None] * scale[None, :]
    opened = tl.sigmoid(factor)
    if SILU:
        opened = opened * factor
    value = (value * opened).to(x.dtype.element_ty)
    if ROUND:
        of_vector, value = round_groups(value.to(tl.float32), LARGEST, TINY)
        of_scales = head * (vectors // HEADS) + token if BY_COLUMN else vector
        tl.store(scales + of_scales, of_vector, mask=vector < vectors)
    tl.store(out + own, value.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str = "silu"
) -> torch.Tensor:
    """Return the gated norm of each head's vector, as layers/state/gates.py does."""
    return _gated_norm(x, gate, weight, eps, torch.empty_like(x), None, activation)


def rounded_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, by_column: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gated norm rounded to e4m3 with a scale per vector, as `round_fp8` rounds groups of columns.

    Args:
        x, gate, weight, eps: as for `gated_norm`, with vectors of 128 numbers.
        by_column: whether scales of the same head are neighbours in memory.

    Returns:
        Codes [tokens, heads, width], and scales float32 [tokens, heads].
    """
    tokens, heads, width = x.shape
    assert width == GROUP
    codes = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    shape = (heads, tokens) if by_column else (tokens, heads)
    scales = torch.empty(shape, device=x.device, dtype=torch.float32)
    _gated_norm(x, gate, weight, eps, codes, scales, "silu", by_column)
    return codes, scales.t() if by_column else scales


def _gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    activation: str,
    by_column: bool = False,
) -> torch.Tensor:
    """Write the gated norm to `out`, rounded if there are `scales`, and return it."""
    tokens, heads, width = x.shape
    assert x.is_contiguous() and gate.stride()[1:] == (width, 1) and activation in ("silu", "sigmoid")
    pad = triton.next_power_of_2(width)
    block = max(1, _NUMBERS // pad) if tokens > 16 else 1
    _norm_and_gate[(triton.cdiv(tokens * heads, block),)](
        x, gate, weight, out, out if scales is None else scales, tokens * heads, gate.stride(0), eps,
        HEADS=heads, WIDTH=width, WIDTH_PAD=pad, BLOCK=block, SILU=activation == "silu", ROUND=scales is not None,
        BY_COLUMN=by_column, LARGEST=LARGEST, TINY=TINY, num_warps=4 if block > 1 else 1,
    )  # fmt: skip
    return out
