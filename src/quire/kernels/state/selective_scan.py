"""The selective scan of Mamba-1, token by token; layers/state/selective_scan.py defines it.

A program owns a tile of channels of one row, and keeps their states in registers. It reads and writes the state once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.rows import StateRows


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
    EACH: tl.constexpr,
) -> None:
    """Grid (tiles of channels, rows)."""
    row = tl.program_id(1)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    if last <= first:
        return
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    number = tl.arange(0, N_PAD)
    has_channel, has_number = channel < channels, number < N
    inside = has_channel[:, None] & has_number[None, :]
    part = channel[:, None] * N + number[None, :]
    size = channels.to(tl.int64) * N
    own = tl.load(index + row).to(tl.int64)
    begins = tl.load(fresh + row).to(tl.int1)
    vector = tl.load(state + own * size + part, mask=inside & (begins == 0), other=0.0)
    rate = tl.load(a + part, mask=inside, other=0.0)
    skip = tl.load(d + channel, mask=has_channel, other=0.0)
    token = first.to(tl.int64)
    for _ in range(last - first):
        value = tl.load(x + token * x_token + channel, mask=has_channel, other=0.0).to(tl.float32)
        time = tl.load(step + token * channels + channel, mask=has_channel, other=0.0)
        write = tl.load(b + token * N + number, mask=has_number, other=0.0).to(tl.float32)
        read = tl.load(c + token * N + number, mask=has_number, other=0.0).to(tl.float32)
        vector = vector * tl.exp(time[:, None] * rate) + (time * value)[:, None] * write[None, :]
        y = tl.sum(vector * read[None, :], 1) + skip * value
        tl.store(out + token * channels + channel, y.to(out.dtype.element_ty), mask=has_channel)
        if EACH:
            target = tl.load(targets + token).to(tl.int64)
            tl.store(state + target * size + part, vector, mask=inside & (target >= 0))
        token += 1
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
    block = 64
    _scan[(triton.cdiv(channels, block), len(rows.index))](
        x, step.contiguous(), a, b.contiguous(), c.contiguous(), d, state, rows.index, rows.starts, rows.fresh,
        rows.starts if rows.targets is None else rows.targets, out, channels, x.stride(0),
        N=depth, N_PAD=triton.next_power_of_2(depth), BLOCK_C=block, EACH=rows.targets is not None, num_warps=2,
    )  # fmt: skip
    return out
