"""Rounding of activations to e4m3, fused with the operation in front: an RMS norm or the activation of a gated MLP.

The values are rounded to the model's dtype first, as the separate operation rounds them. A scale is the largest
magnitude of its columns divided by 448, the largest e4m3 number, so that a NaN or an infinity makes its scale NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.activation import activate
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

GROUP = 128
LARGEST = 448.0
TINY = 1e-12  # scale of zeros


@triton.jit
def round_groups(values, LARGEST: tl.constexpr, TINY: tl.constexpr):
    """Return the scales [groups] of fp32 [groups, columns], NaN if a number is not finite, and the scaled numbers."""
    scales = tl.maximum(tl.max(tl.abs(values), 1) / LARGEST, TINY) + tl.sum(values * 0.0, 1)
    return scales, tl.minimum(tl.maximum(values / scales[:, None], -LARGEST), LARGEST)


@kernel
def _round(
    x,  # [rows, WIDTH], with KIND [rows, 2 * WIDTH]
    residual,  # [rows, WIDTH], if ADD
    weight,  # of the norm [WIDTH], if NORM
    static_scale,  # fp32, if STATIC
    codes,  # e4m3 [rows, WIDTH]
    scales,  # fp32 [rows, GROUPS]; with BY_COLUMN [GROUPS, rows]
    total,  # [rows, WIDTH]: x + residual, if ADD
    normed,  # [rows, WIDTH]: the values that are rounded, if KEEP
    eps,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    STATIC: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,  # scales per row
    GROUP: tl.constexpr,  # columns per scale
    BY_COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, tiles of columns); a norm or a scale per row takes a single tile."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    dtype: tl.constexpr = x.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if KIND != "":
        from_x = x + row * (2 * WIDTH) + at
        gate = tl.load(from_x, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(from_x + WIDTH, mask=inside, other=0.0).to(tl.float32)
        value = activate(gate, KIND).to(dtype).to(tl.float32) * up
    else:
        value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(dtype)
        tl.store(total + row * WIDTH + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if NORM:
        value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * gain
    if KEEP:
        tl.store(normed + row * WIDTH + at, value.to(dtype), mask=inside)
    value = value.to(dtype).to(tl.float32)
    if STATIC:
        scale = tl.load(static_scale)
        value = value / scale
        tl.store(scales + row, scale)
    elif GROUPS == 1:
        scale = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, TINY) + tl.sum(value * 0.0, 0)
        value = value / scale
        tl.store(scales + row, scale)
    else:
        scale, wide = round_groups(tl.reshape(value, [BLOCK // GROUP, GROUP]), LARGEST, TINY)
        value = tl.reshape(wide, [BLOCK])
        group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        place = group * tl.num_programs(0) + row if BY_COLUMN else row * GROUPS + group
        tl.store(scales + place, scale, mask=group < GROUPS)
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(codes + row * WIDTH + at, value.to(tl.float8e4nv), mask=inside)


def round_fp8(
    x: torch.Tensor,
    by_group: bool,
    static_scale: torch.Tensor | None = None,
    *,
    kind: str | None = None,
    norm: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
    by_column: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round x, or norm(x + residual), or act(gate) * up of x = gate|up, to e4m3.

    Args:
        x: [rows, width], contiguous; with a `kind` [rows, 2 * width].
        by_group: whether there is one scale per row and 128 columns instead of one per row.
        static_scale: an fp32 number that replaces the scales of the rows.
        kind: activation of a gated MLP.
        norm: weight of an RMS norm, [width].
        residual: added before the norm, [rows, width].
        eps: of the norm.
        by_column: whether scales of the same group are neighbours in memory, as the library's products want them.

    Returns:
        The codes e4m3 [rows, width]; the scales, fp32 [rows, 1] or [rows, width / 128 rounded up]; and the sum
        x + residual, or x.
    """
    codes, scales, total, _ = _launch(x, by_group, static_scale, kind, norm, residual, eps, by_column, False)
    return codes, scales, total


def norm_and_round(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    by_group: bool,
    by_column: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes, scales and sum of `round_fp8` of norm(x + residual), and the normed rows [rows, width]."""
    return _launch(x, by_group, None, None, norm, residual, eps, by_column, True)


def _launch(
    x: torch.Tensor,
    by_group: bool,
    static_scale: torch.Tensor | None,
    kind: str | None,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    by_column: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales, sum, and with `keep` the values that were rounded."""
    rows, width = x.shape[0], x.shape[1] if kind is None else x.shape[1] // 2
    groups = triton.cdiv(width, GROUP) if by_group else 1
    codes = torch.empty(rows, width, device=x.device, dtype=torch.float8_e4m3fn)
    shape = (groups, rows) if by_column else (rows, groups)
    scales = torch.empty(shape, device=x.device, dtype=torch.float32)
    total = x if residual is None else torch.empty_like(x)
    normed = torch.empty_like(x) if keep else x
    block = max(triton.next_power_of_2(width), GROUP)
    if norm is None and by_group:
        block = min(block, 2048)
    pdl = target_of(x.device).has_dependent_launch
    _round[(rows, triton.cdiv(width, block))](
        x, x if residual is None else residual, x if norm is None else norm,
        x if static_scale is None else static_scale, codes, scales, total, normed, eps,
        NORM=norm is not None, ADD=residual is not None, KEEP=keep, STATIC=static_scale is not None, KIND=kind or "",
        GROUPS=groups, GROUP=GROUP, BY_COLUMN=by_column, WIDTH=width, BLOCK=block, LARGEST=LARGEST, TINY=TINY, PDL=pdl,
        num_warps=min(max(block // 256, 1), 16), launch_pdl=pdl,
    )  # fmt: skip
    return codes, scales.t() if by_column else scales, total, normed
