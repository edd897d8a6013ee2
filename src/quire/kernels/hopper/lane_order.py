"""The order of columns of x in which the threads of `rows_product` hold those of 4-bit weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.target import target_of

_BLOCK = 1024


@triton.jit
def source_of(to):
    """Return the column of x that has the place `to`.

    A thread holds 16 bytes of each 64 of W: four words. The matrix units multiply 16 columns at a time, of which a
    thread gives those at 2 c, 2 c + 1, 2 c + 8 and 2 c + 9: the bytes 0, 2, 1 and 3 of a word.
    """
    word, place = to % 64 // 16, to % 16
    thread, odd, second = place % 8 // 2, place % 2, place // 8
    return to // 64 * 64 + thread * 16 + word * 4 + odd * 2 + second


@kernel
def _lane_order(x, y, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """Grid (rows, blocks of columns)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    to = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * K
    tl.store(y + row + to, tl.load(x + row + source_of(to), mask=to < K, other=0), mask=to < K)


def lane_order(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, inputs] with its columns in the order of the threads; the inputs are a multiple of 64."""
    y = torch.empty_like(x)
    pdl = target_of(x.device).has_dependent_launch
    _lane_order[(x.shape[0], triton.cdiv(x.shape[1], _BLOCK))](
        x, y, K=x.shape[1], BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y
