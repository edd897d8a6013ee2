"""The gate of attention (arXiv:2505.06708): x * sigmoid(gate), which may be rounded for the product behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.matmul.round_fp8 import GROUP, LARGEST, TINY, round_groups
from quire.kernels.target import target_of

_BLOCK = 1024


@kernel
def _open_gate(
    x,  # [rows, WIDTH]
    gate,  # [rows, WIDTH], row stride `stride`
    out,  # [rows, WIDTH]; e4m3 with ROUND
    scales,  # fp32 [rows, WIDTH / GROUP], with BY_COLUMN [WIDTH / GROUP, rows], if ROUND
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, tiles of WIDTH)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    opened = tl.sigmoid(tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32))
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    value = (value * opened.to(dtype).to(tl.float32)).to(dtype)
    if ROUND:
        wide = tl.reshape(value.to(tl.float32), [BLOCK // GROUP, GROUP])
        scale, wide = round_groups(wide, LARGEST, TINY)
        value = tl.reshape(wide, [BLOCK])
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        place = group * tl.num_programs(0) + row if BY_COLUMN else row * (WIDTH // GROUP) + group
        tl.store(scales + place, scale, mask=group < WIDTH // GROUP)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def open_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate), rounded as two torch calls round it.

    Args:
        x: [rows, width], contiguous.
        gate: [rows, width], with contiguous rows.
    """
    return _launch_open_gate(x, gate, torch.empty_like(x), None, False)


def open_gate_rounded(
    x: torch.Tensor, gate: torch.Tensor, by_column: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x * sigmoid(gate) rounded to e4m3 as `round_fp8` rounds groups of columns.

    Args:
        x, gate: as for `open_gate`, with a width that is a multiple of 128.
        by_column: whether scales of the same group are neighbours in memory.

    Returns:
        Codes [rows, width], and scales float32 [rows, width / 128].
    """
    rows, width = x.shape
    groups, left = divmod(width, GROUP)
    assert not left
    codes = torch.empty(rows, width, device=x.device, dtype=torch.float8_e4m3fn)
    shape = (groups, rows) if by_column else (rows, groups)
    scales = torch.empty(shape, device=x.device, dtype=torch.float32)
    _launch_open_gate(x, gate, codes, scales, by_column)
    return codes, scales.t() if by_column else scales


def _launch_open_gate(
    x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, by_column: bool
) -> torch.Tensor:
    """Write x * sigmoid(gate) to `out`, rounded if there are `scales`, and return it."""
    rows, width = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1
    pdl = target_of(x.device).has_dependent_launch
    if rows:
        _open_gate[(rows, triton.cdiv(width, _BLOCK))](
            x, gate, out, out if scales is None else scales, gate.stride(0), WIDTH=width, BLOCK=_BLOCK,
            ROUND=scales is not None, BY_COLUMN=by_column, GROUP=GROUP, LARGEST=LARGEST, TINY=TINY, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
