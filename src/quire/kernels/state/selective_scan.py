"""The selective scan of Mamba-1 in chunks of tokens; layers/state/selective_scan.py defines it.

A program owns a tile of channels of one row, and keeps their states in registers. It reads and writes the state once.
Tokens depend on each other through one product and sum per number of the state. So the time of a prompt is that of the
loads, unless many are under way: a program loads all tokens of a chunk before it computes the first. Prompts have small
tiles, because one prompt must fill the GPU with channels alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.rows import StateRows


class ScanTile(NamedTuple):
    """The tile of a program: tokens of a chunk, channels, and warps."""

    chunk: int
    channels: int
    warps: int


DECODING = ScanTile(1, 64, 2)
PROMPT = ScanTile(16, 4, 1)


@kernel
def _scan(
    x,  # [tokens, channels], row stride x_token
    step,  # float32 [tokens, channels], contiguous
    a,  # float32 [channels, N]
    b,  # [tokens, N], contiguous
    c,  # [tokens, N], contiguous
    d,  # float32 [channels]
    state,  # float32 [states, channels, N]
    index,
    starts,
    fresh,
    targets,
    out,  # [tokens, channels]
    channels,
    x_token,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    """Grid (tiles of channels, rows)."""
    row = tl.program_id(1)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    if last <= first:
        return
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    component = tl.arange(0, N_PAD)
    has_channel, has_component = channel < channels, component < N
    inside = has_channel[:, None] & has_component[None, :]
    part = channel[:, None] * N + component[None, :]
    size = channels.to(tl.int64) * N
    own = tl.load(index + row).to(tl.int64)
    begins = tl.load(fresh + row).to(tl.int1)
    vector = tl.load(state + own * size + part, mask=inside & (begins == 0), other=0.0)
    rate = tl.load(a + part, mask=inside, other=0.0) * 1.4426950408889634  # for powers of 2
    skip = tl.load(d + channel, mask=has_channel, other=0.0)
    for number in range(tl.cdiv(last - first, CHUNK)):
        begin = first.to(tl.int64) + number * CHUNK
        values, times, writes, reads = (), (), (), ()
        for place in tl.static_range(CHUNK):
            token, there = begin + place, begin + place < last
            value = tl.load(x + token * x_token + channel, mask=has_channel & there, other=0.0)
            time = tl.load(step + token * channels + channel, mask=has_channel & there, other=0.0)
            write = tl.load(b + token * N + component, mask=has_component & there, other=0.0)
            read = tl.load(c + token * N + component, mask=has_component & there, other=0.0)
            values = values + (value,)  # type: ignore[assignment]
            times = times + (time,)  # type: ignore[assignment]
            writes = writes + (write,)  # type: ignore[assignment]
            reads = reads + (read,)  # type: ignore[assignment]
        # A token behind the last has a time step of 0, so the state stays.
        for place in tl.static_range(CHUNK):
            token, there = begin + place, begin + place < last
            value, time = values[place].to(tl.float32), times[place]
            write, read = writes[place].to(tl.float32), reads[place].to(tl.float32)
            vector = vector * tl.exp2(time[:, None] * rate) + (time * value)[:, None] * write[None, :]
            y = tl.sum(vector * read[None, :], 1) + skip * value
            tl.store(out + token * channels + channel, y.to(out.dtype.element_ty), mask=has_channel & there)
            if EACH:
                target = tl.load(targets + token, mask=there, other=-1).to(tl.int64)
                tl.store(state + target * size + part, vector, mask=inside & (target >= 0))
    if not EACH:
        tl.store(state + own * size + part, vector, mask=inside)


def selective_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Advance the state of each row, as layers/state/selective_scan.py does."""
    (tokens, channels), depth = x.shape, a.shape[1]
    out = torch.empty(tokens, channels, device=x.device, dtype=x.dtype)
    tile = DECODING if rows.short_only else PROMPT
    _scan[(triton.cdiv(channels, tile.channels), len(rows.index))](
        x, step.contiguous(), a, b.contiguous(), c.contiguous(), d, state, rows.index, rows.starts, rows.fresh,
        rows.starts if rows.targets is None else rows.targets, out, channels, x.stride(0),
        N=depth, N_PAD=triton.next_power_of_2(depth), BLOCK_C=tile.channels, CHUNK=tile.chunk, EACH=rows.targets is not None,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
