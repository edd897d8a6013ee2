"""RMSNorm and LayerNorm over rows, alone or with the addition of the residual in front, in one pass.

One program per row. Arithmetic is in fp32. The sum is rounded to its dtype before the norm, so that
the norm sees what the next layer gets as the residual; the normed value is rounded once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels import dependent_launch


@triton.jit
def _rms_norm(
    x,  # [rows, WIDTH]
    residual,  # [rows, WIDTH], read if ADD
    weight,  # [WIDTH]
    normed,  # [rows, WIDTH]
    total,  # [rows, WIDTH], x + residual, written if ADD
    eps,
    ADD: tl.constexpr,
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
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(normed + row + at, (value * scale * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm(
    x,  # [rows, WIDTH]
    residual,  # [rows, WIDTH], read if ADD
    weight,  # [WIDTH]
    bias,  # [WIDTH]
    normed,  # [rows, WIDTH]
    total,  # [rows, WIDTH], x + residual, written if ADD
    eps,
    ADD: tl.constexpr,
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
    b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    tl.store(normed + row + at, (centred * scale * w + b).to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, width], contiguous; the weight may have another dtype than x."""
    normed = torch.empty_like(x)
    width = x.shape[-1]
    grid = (x.numel() // width,)
    _rms_norm[grid](x, x, weight, normed, normed, eps, ADD=False, WIDTH=width, **_launch(width, x.device))
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed sum, and the sum, in fresh memory: a caller may still hold the old residual."""
    normed, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    grid = (x.numel() // width,)
    _rms_norm[grid](
        x, residual, weight, normed, total, eps, ADD=True, WIDTH=width, **_launch(width, x.device)
    )
    return normed, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    normed = torch.empty_like(x)
    width = x.shape[-1]
    grid = (x.numel() // width,)
    _layer_norm[grid](
        x, x, weight, bias, normed, normed, eps, ADD=False, WIDTH=width, **_launch(width, x.device)
    )
    return normed


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    grid = (x.numel() // width,)
    _layer_norm[grid](
        x, residual, weight, bias, normed, total, eps, ADD=True, WIDTH=width, **_launch(width, x.device)
    )
    return normed, total


def _launch(width: int, device: torch.device) -> dict[str, int | bool]:
    """Eight elements a thread: 16-byte accesses in half precision, and few steps to the row's sum."""
    block, pdl = triton.next_power_of_2(width), dependent_launch(device)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16), "PDL": pdl, "launch_pdl": pdl}
