"""Causal depthwise convolution over ragged rows; layers/state/conv.py defines it.

One kernel computes the outputs, a second one the windows, because outputs still read the old ones. Bytes: x and y once,
the windows once each way. Tokens of prompts are convolved in strips: a program reads each input of its strip once, into
registers, which takes half as many instructions as a tile of tokens and channels. Strips that read a window or end
behind a row are cut into tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.rows import StateRows, rows_pad

_FEW_TOKENS = 64  # steps of more tokens that do not only decode are convolved in strips
_STRIP_CHANNELS = 512
_TILE_CHANNELS = 128


@triton.jit
def _owner(starts, rows, at, ROWS_PAD: tl.constexpr):
    """Return the row of each of the tokens `at`; tokens behind the last row get the last one."""
    index = tl.arange(0, ROWS_PAD)
    ends = tl.load(starts + 1 + index, mask=index < rows, other=2147483647)
    return tl.minimum(tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1), rows - 1)


@triton.jit
def _convolve_strip(
    x,
    taps,
    bias,
    y,
    first,
    channel,
    inside,
    channels,
    x_stride,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve BLOCK_T tokens from `first` on, which are of one row and have WIDTH - 1 tokens of it before them."""
    inputs = ()
    for place in tl.static_range(BLOCK_T + WIDTH - 1):
        from_x = x + (first + place - (WIDTH - 1)).to(tl.int64) * x_stride + channel
        inputs = inputs + (tl.load(from_x, mask=inside, other=0.0),)  # type: ignore[assignment]
    weights = ()
    for back in tl.static_range(WIDTH):
        weight = tl.load(taps + (WIDTH - 1 - back) * channels + channel, mask=inside, other=0.0)
        weights = weights + (weight,)  # type: ignore[assignment]
    begin = tl.zeros([BLOCK_C], tl.float32)
    if BIAS:
        begin += tl.load(bias + channel, mask=inside, other=0.0)
    for place in tl.static_range(BLOCK_T):
        total = begin
        for back in tl.static_range(WIDTH):
            total += inputs[place + WIDTH - 1 - back].to(tl.float32) * weights[back]
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(
            y + (first + place).to(tl.int64) * channels + channel, total.to(y.dtype.element_ty), mask=inside
        )


@triton.jit
def _convolve_tile(
    x,
    taps,
    bias,
    window,
    index,
    starts,
    fresh,
    y,
    first,
    channel,
    tokens,
    channels,
    rows,
    x_stride,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve BLOCK_T tokens from `first` on, of any rows."""
    at = first + tl.arange(0, BLOCK_T)
    owner = _owner(starts, rows, at, ROWS_PAD)
    offset = at - tl.load(starts + owner)
    state = tl.load(index + owner).to(tl.int64)
    begins = tl.load(fresh + owner).to(tl.int1)
    inside = channel < channels
    there = (at < tokens)[:, None] & inside[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    for back in tl.static_range(WIDTH):
        weight = tl.load(taps + (WIDTH - 1 - back) * channels + channel, mask=inside, other=0.0)
        new = (offset >= back)[:, None]
        from_x = x + (at - back).to(tl.int64)[:, None] * x_stride + channel[None, :]
        value = tl.load(from_x, mask=there & new, other=0.0).to(tl.float32)
        if back:
            old = there & (offset < back)[:, None] & (begins == 0)[:, None]
            place = (state * (WIDTH - 1) + (WIDTH - 1 + offset - back))[:, None] * channels + channel[None, :]
            value += tl.load(window + place, mask=old, other=0.0).to(tl.float32)
        total += value * weight[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    to = y + at.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=there)


@kernel(do_not_specialize=["tokens", "rows"])
def _convolve(
    x,  # [tokens, channels], row stride `x_stride`
    taps,  # float32 [WIDTH, channels]
    bias,  # float32 [channels], read if BIAS
    window,  # [states, WIDTH - 1, channels]
    index,  # int64 [rows]
    starts,  # int32 [rows + 1]
    fresh,  # bool [rows]
    y,  # [tokens, channels]
    tokens,
    channels,
    rows,
    x_stride,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE_C: tl.constexpr,
    STRIPS: tl.constexpr,
) -> None:
    """Grid (tiles of tokens, tiles of channels)."""
    first = tl.program_id(0) * BLOCK_T
    if STRIPS:
        ends = tl.load(starts + 1 + tl.arange(0, ROWS_PAD), mask=tl.arange(0, ROWS_PAD) < rows, other=0)
        # No row begins behind the first input of the strip or in the strip, and the strip is not behind the last row.
        cuts = (ends > first - (WIDTH - 1)) & (ends < first + BLOCK_T)
        if (first >= WIDTH - 1) & (tl.max(ends, 0) >= first + BLOCK_T) & (tl.sum(cuts.to(tl.int32), 0) == 0):
            channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
            _convolve_strip(
                x, taps, bias, y, first, channel, channel < channels, channels, x_stride, WIDTH, BIAS, SILU, BLOCK_T,
                BLOCK_C,
            )  # fmt: skip
            return
    for part in range(0, BLOCK_C, TILE_C):
        channel = tl.program_id(1) * BLOCK_C + part + tl.arange(0, TILE_C)
        _convolve_tile(
            x, taps, bias, window, index, starts, fresh, y, first, channel, tokens, channels, rows, x_stride, WIDTH,
            BIAS, SILU, ROWS_PAD, BLOCK_T, TILE_C,
        )  # fmt: skip


@kernel(do_not_specialize=["rows"])
def _keep(
    x,
    window,
    index,
    starts,
    fresh,
    kept,  # [rows, or tokens if EACH, WIDTH - 1, channels]; the window itself if IN_PLACE
    channels,
    rows,
    x_stride,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,  # windows after each token, not after each row
    ROWS_PAD: tl.constexpr,
    KEPT_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Write the window after a row or token. Grid (rows or tokens, tiles of channels)."""
    item = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = tl.arange(0, KEPT_PAD)
    row = item
    if EACH:
        row = tl.sum(_owner(starts, rows, item + tl.zeros([1], tl.int32), ROWS_PAD), 0)
    first = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first
    if EACH:
        length = item - first + 1
    state = tl.load(index + row).to(tl.int64)
    begins = tl.load(fresh + row).to(tl.int1)
    position = length - (WIDTH - 1) + place  # in the row; negative: in the old window
    valid = (place < WIDTH - 1)[:, None] & (channel < channels)[None, :]
    new = tl.load(
        x + (first + position).to(tl.int64)[:, None] * x_stride + channel[None, :],
        mask=valid & (position >= 0)[:, None],
        other=0.0,
    )
    older = (state * (WIDTH - 1) + position + WIDTH - 1)[:, None] * channels + channel[None, :]
    keeps = valid & (position < 0)[:, None] & (begins == 0)
    old = tl.load(window + older, mask=keeps, other=0.0)
    value = tl.where((position >= 0)[:, None], new, old)
    tl.debug_barrier()  # other threads may still read what is overwritten here
    to = state
    if EACH:
        to = item.to(tl.int64)
    tl.store(kept + (to * (WIDTH - 1) + place)[:, None] * channels + channel[None, :], value, mask=valid)


@kernel
def _convolve_ones(
    x,
    taps,
    bias,
    window,
    index,
    starts,
    fresh,
    y,
    channels,
    x_stride,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    KEPT_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Convolve rows of one token and move their windows on. Grid (rows, tiles of channels)."""
    row = tl.program_id(0)
    token = tl.load(starts + row).to(tl.int64)
    if tl.load(starts + row + 1) <= token:
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = tl.arange(0, KEPT_PAD)
    inside = channel < channels
    valid = (place < WIDTH - 1)[:, None] & inside[None, :]
    begins = tl.load(fresh + row).to(tl.int1)
    first = window + tl.load(index + row).to(tl.int64) * (WIDTH - 1) * channels
    at = place[:, None] * channels + channel[None, :]
    new = tl.load(x + token * x_stride + channel, mask=inside, other=0.0)
    old = tl.load(first + at, mask=valid & (begins == 0), other=0.0)
    weight = tl.load(taps + at, mask=valid, other=0.0)
    total = tl.sum(old.to(tl.float32) * weight, 0)
    total += new.to(tl.float32) * tl.load(taps + (WIDTH - 1) * channels + channel, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(y + token * channels + channel, total.to(y.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads may still read what is overwritten here
    tl.store(first + at - channels, old, mask=valid & (place > 0)[:, None])
    tl.store(first + (WIDTH - 2) * channels + channel, new.to(window.dtype.element_ty), mask=inside)


@kernel
def _scatter(kept, targets, window, size, BLOCK: tl.constexpr) -> None:
    """Copy windows to the states that tokens name. Grid (tokens, tiles of a window)."""
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    if target < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(kept + tl.program_id(0).to(tl.int64) * size + at, mask=at < size)
    tl.store(window + target * size + at, value, mask=at < size)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor,
    rows: StateRows,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve each row, as layers/state/conv.py does; the activation is silu or None."""
    assert activation in (None, "silu") and x.stride(1) == 1
    (tokens, channels), width, count = x.shape, weight.shape[0], len(rows.index)
    y = torch.empty(tokens, channels, device=x.device, dtype=x.dtype)
    pad, block_t = rows_pad(count), 4 if tokens <= _FEW_TOKENS else 16
    strips = tokens > _FEW_TOKENS and not rows.short_only
    block_c = _STRIP_CHANNELS if strips else _TILE_CHANNELS
    tiles = triton.cdiv(channels, _TILE_CHANNELS)
    each = rows.targets is not None
    kept_pad = triton.next_power_of_2(max(width - 1, 2))
    if rows.short_only and rows.most == 1 and not each:
        _convolve_ones[(count, tiles)](
            x, weight, weight if bias is None else bias, window, rows.index, rows.starts, rows.fresh, y, channels,
            x.stride(0), WIDTH=width, BIAS=bias is not None, SILU=activation == "silu", KEPT_PAD=kept_pad,
            BLOCK_C=_TILE_CHANNELS, num_warps=1,
        )  # fmt: skip
        return y
    _convolve[(triton.cdiv(tokens, block_t), triton.cdiv(channels, block_c))](
        x, weight, weight if bias is None else bias, window, rows.index, rows.starts, rows.fresh, y,
        tokens, channels, count, x.stride(0),
        WIDTH=width, BIAS=bias is not None, SILU=activation == "silu", ROWS_PAD=pad, BLOCK_T=block_t, BLOCK_C=block_c,
        TILE_C=_TILE_CHANNELS, STRIPS=strips,
    )  # fmt: skip
    kept = torch.empty(tokens, *window.shape[1:], device=x.device, dtype=window.dtype) if each else window
    _keep[(tokens if each else count, tiles)](
        x, window, rows.index, rows.starts, rows.fresh, kept, channels, count, x.stride(0),
        WIDTH=width, EACH=each, ROWS_PAD=pad if each else 1, KEPT_PAD=kept_pad, BLOCK_C=_TILE_CHANNELS,
    )  # fmt: skip
    if rows.targets is not None:
        size = (width - 1) * channels
        _scatter[(tokens, triton.cdiv(size, 1024))](kept, rows.targets, window, size, BLOCK=1024)
    return y
