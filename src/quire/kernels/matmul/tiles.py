"""Sizes of the programs that multiply with quantised weights, and the numbers of rows that each kernel is for.

Not yet measured; benchmarks/quantised_products.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedTile:
    """Sizes of a program of `packed_product`."""

    block_n: int  # rows of the weight
    block_k: int  # columns per product; ignored for 4 bits, where the order of nibbles decides
    warps: int
    stages: int
    programs: int = 2  # per multiprocessor, up to which the columns are split; 0: no split


def tile_for(format: str, rows: int, outputs: int, inputs: int, in_fp8: bool, normed: bool) -> PackedTile:
    """Return the sizes of a program.

    Args:
        format: fp8, byte (signed integers; "int8" would mean a dtype to Triton), int4 or fp4.
        rows: of x.
        outputs, inputs: of the weight.
        in_fp8: whether x is e4m3.
        normed: whether a norm is fused, which excludes splitting the columns.
    """
    if rows <= 16:
        return PackedTile(64, 128, 4, 4, 0 if normed else 4)
    if rows <= 64:
        return PackedTile(64, 128, 4, 4, 2)
    return PackedTile(128, 128, 8, 4, 2)


def fused_rows(format: str) -> int:
    """Return the largest number of rows for which the product is fused with its neighbours."""
    return 4


def rows_in_registers(format: str, outputs: int, inputs: int) -> int:
    """Return the largest number of rows that the kernel multiplies with the weight converted in registers."""
    return 256 if format in ("int4", "fp4") else 64


def rows_in_fp8(outputs: int, inputs: int) -> int:
    """Return the largest number of rows for which the kernel is faster in FP8 than the library's."""
    return 128
