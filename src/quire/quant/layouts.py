"""Layouts: all of a form but its numbers. Parts of a fused weight with equal layouts become one weight.

`allocate` makes the memory that a part's reader fills, perhaps in the background. Layouts are compared by value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from quire.quant.forms import (
    FP8_BLOCK,
    Fp4Weight,
    Fp8Weight,
    Int8Weight,
    IntGroupWeight,
    QuantisedWeight,
    Rounding,
)


class FormLayout(Protocol):
    """The layout of a quantised weight."""

    @property
    def row_step(self) -> int:
        """Return the number of rows at whose multiples a part of a fused weight begins."""
        ...

    def allocate(self, lead: tuple[int, ...], rows: int, cols: int, device: torch.device) -> QuantisedWeight:
        """Allocate a weight [*lead, rows, cols], where `lead` is () or the number of experts."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """The layout of an `Fp8Weight`; `input_scale` is the static scale of activations."""

    by_block: bool
    rounding: Rounding
    input_scale: float | None = None

    @property
    def row_step(self) -> int:
        return FP8_BLOCK if self.by_block else 1

    def allocate(self, lead: tuple[int, ...], rows: int, cols: int, device: torch.device) -> Fp8Weight:
        scales = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)) if self.by_block else (rows, 1)
        scale = self.input_scale
        return Fp8Weight(
            torch.empty(*lead, rows, cols, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(*lead, *scales, device=device),
            self.rounding,
            None if scale is None else torch.tensor(scale, device=device),
        )


@dataclass(frozen=True, slots=True)
class Int8Layout:
    """The layout of an `Int8Weight`."""

    rounding: Rounding
    row_step = 1

    def allocate(self, lead: tuple[int, ...], rows: int, cols: int, device: torch.device) -> Int8Weight:
        weight = torch.empty(*lead, rows, cols, dtype=torch.int8, device=device)
        return Int8Weight(weight, torch.empty(*lead, rows, 1, device=device), self.rounding)


@dataclass(frozen=True, slots=True)
class IntGroupLayout:
    """The layout of an `IntGroupWeight`; `permutation` holds the bytes of its int64 numbers."""

    bits: int
    group_size: int
    scale_dtype: torch.dtype
    has_zero: bool = False
    has_offset: bool = False
    permutation: bytes | None = None
    row_step = 1

    def allocate(self, lead: tuple[int, ...], rows: int, cols: int, device: torch.device) -> IntGroupWeight:
        def groups(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(*lead, rows, cols // self.group_size, dtype=dtype, device=device)

        order = None
        if self.permutation is not None:
            order = torch.frombuffer(bytearray(self.permutation), dtype=torch.int64).to(device)
            order = order.expand(*lead, cols).contiguous()
        return IntGroupWeight(
            torch.empty(*lead, rows, cols * self.bits // 8, dtype=torch.uint8, device=device),
            self.bits,
            groups(self.scale_dtype),
            groups(torch.uint8) if self.has_zero else None,
            groups(self.scale_dtype) if self.has_offset else None,
            order,
        )


@dataclass(frozen=True, slots=True)
class Fp4Layout:
    """The layout of an `Fp4Weight`: NVFP4 if it `has_global` scales, else MXFP4."""

    has_global: bool
    row_step = 1

    def allocate(self, lead: tuple[int, ...], rows: int, cols: int, device: torch.device) -> Fp4Weight:
        group, dtype = (16, torch.float8_e4m3fn) if self.has_global else (32, torch.uint8)
        return Fp4Weight(
            torch.empty(*lead, rows, cols // 2, dtype=torch.uint8, device=device),
            torch.empty(*lead, rows, cols // group, dtype=dtype, device=device),
            torch.empty(*lead, rows, 1, device=device) if self.has_global else None,
        )


def merge(one: FormLayout, other: FormLayout, stacked: bool = False) -> FormLayout | None:
    """Return the layout of a weight that holds parts of both layouts; None if there is none.

    Experts that are `stacked` have their own permutations, and share the larger of their static scales.
    """
    if one == other:
        return one
    if isinstance(one, Fp8Layout) and isinstance(other, Fp8Layout) and stacked:
        scales = (one.input_scale or 0.0, other.input_scale or 0.0)
        one, other = (replace(layout, input_scale=max(scales) or None) for layout in (one, other))
    elif isinstance(one, IntGroupLayout) and isinstance(other, IntGroupLayout):
        has_zero = one.has_zero or other.has_zero
        order = one.permutation or other.permutation
        orders = (order, order) if stacked else (one.permutation, other.permutation)
        one, other = (
            replace(layout, has_zero=has_zero, permutation=kept) for layout, kept in zip((one, other), orders)
        )
    return one if one == other else None
