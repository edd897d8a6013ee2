"""The activation of a gated MLP: act(gate) * up over packed rows gate|up, in one pass.

The activation is computed in fp32 and rounded before the product, exactly as two torch calls round it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.target import target_of

_BLOCK = 1024


@triton.jit
def activate(gate, KIND: tl.constexpr):
    if KIND == "silu":
        return gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2u)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(KIND == "relu")
        return tl.maximum(gate, 0.0)


@triton.jit
def gate_up_product(gate, up, KIND: tl.constexpr, dtype: tl.constexpr):
    """Return act(gate) * up in fp32; gate, up and act(gate) are rounded to `dtype` as separate calls round them."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if KIND == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * (gate * tl.sigmoid(1.702 * gate))
    else:
        return activate(gate, KIND).to(dtype).to(tl.float32) * up


@kernel
def _gated(
    gate_up,  # [rows, 2 * WIDTH]
    out,  # [rows, WIDTH]
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = gate_up + row * (2 * WIDTH) + at
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + row * WIDTH + at, gate_up_product(gate, up, KIND, dtype).to(dtype), mask=inside)


def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """Return act(gate) * up [rows, width] of the contiguous `gate_up` [rows, 2 * width].

    Args:
        gate_up: gate in the first half of the columns, up in the second.
        kind: the activation: silu, gelu, gelu_tanh, relu or clamped_swiglu.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, device=gate_up.device, dtype=gate_up.dtype)
    grid = (rows, triton.cdiv(width, _BLOCK))
    pdl = target_of(gate_up.device).has_dependent_launch
    _gated[grid](gate_up, out, KIND=kind, WIDTH=width, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out
