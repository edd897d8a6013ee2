"""RMSNorm and LayerNorm over rows, optionally fused with the addition of the residual before them.

Each program handles one row, in fp32. The sum is rounded to its dtype before the norm, so the norm sees the value
that the next layer gets as its residual. The normed value is rounded once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.target import target_of


@kernel
def _norm(
    x,  # [rows, WIDTH]
    residual,  # [rows, WIDTH], read if ADD
    weight,  # [WIDTH]
    bias,  # [WIDTH], read if CENTRED
    normed,  # [rows, WIDTH]
    total,  # [rows, WIDTH], x + residual, written if ADD
    eps,
    ADD: tl.constexpr,
    CENTRED: tl.constexpr,  # LayerNorm: subtract the mean, add the bias
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    result = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * w
    if CENTRED:
        result += b
    tl.store(normed + row + at, result.to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of the contiguous x [rows, width]; `weight` [width] may have another dtype than x."""
    return _run(x, None, weight, None, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of x + residual, and that sum.

    Both are new tensors, because a caller may still hold the old residual.
    """
    return _run(x, residual, weight, None, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the LayerNorm of the contiguous x [rows, width]."""
    return _run(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the LayerNorm of x + residual, and that sum, as new tensors."""
    return _run(x, residual, weight, bias, eps)


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel with eight elements per thread: 16-byte accesses in half precision, and a short reduction."""
    width, pdl = x.shape[-1], target_of(x.device).has_dependent_launch
    block = triton.next_power_of_2(width)
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    _norm[(x.numel() // width,)](
        x, x if residual is None else residual, weight, weight if bias is None else bias, normed, total, eps,
        ADD=residual is not None, CENTRED=bias is not None, WIDTH=width, BLOCK=block,
        num_warps=min(max(block // 256, 1), 16), PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return normed, total
