"""Sizes of the programs that multiply with quantised weights, and the numbers of rows that each kernel is for.

Measured on one H200 in the shapes of Llama-3.1-8B by benchmarks/quantised_products.py (results/h200-quantised.json).
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
    block_m: int = 128  # most rows of x


@dataclass(frozen=True, slots=True)
class RowsTile:
    """Sizes of a program of `nibble_rows`."""

    block_n: int  # rows of the weight
    block_m: int  # most rows of x
    warps: int
    stages: int
    words: int = 64  # most words of a row of the weight per iteration
    programs: int = 1  # per multiprocessor, up to which the columns are split; 0: no split
    scale_w: bool = True  # whether the scales multiply the numbers of W rather than the sums


_NARROW = PackedTile(32, 128, 2, 5, 4)
_DEEP = PackedTile(64, 128, 4, 5, 2)
_SPLIT = PackedTile(64, 128, 4, 4, 4)
_WIDE = PackedTile(128, 128, 4, 4, 2)
_MANY = PackedTile(128, 128, 8, 3, 1)
_PLAIN = PackedTile(64, 128, 4, 4, 2)
_LARGE = 64 << 20  # elements of a weight of which every program has a whole row

_HEAD = 1 << 16  # outputs of the head of a language model, and more

ANY_ROWS = 1 << 30
NARROW_ROWS = 16  # most rows of INT4 weights for `packed_product`; more take `nibble_rows`


def tile_for(format: str, rows: int, outputs: int, inputs: int, in_fp8: bool, grouped: bool) -> PackedTile:
    """Return the sizes of a program.

    Args:
        format: fp8, byte (signed integers; "int8" would mean a dtype to Triton), int4 or fp4.
        rows: of x.
        outputs, inputs: of the weight.
        in_fp8: whether x is e4m3.
        grouped: whether columns have several scales.
    """
    large = outputs * inputs >= _LARGE
    if in_fp8:
        return PackedTile(64, 128, 4, 5, 4) if rows <= 32 else _WIDE if rows <= 64 else _PLAIN
    if rows <= 8:
        if format in ("int4", "fp4"):
            return _DEEP if large else _SPLIT
        if grouped:
            return PackedTile(64, 256, 4, 3, 2) if large or inputs == outputs else _NARROW
        return _SPLIT if large else _DEEP if inputs > 8192 else _NARROW
    if rows <= 16:
        return _NARROW
    if rows <= 32:
        return (_MANY if large else _PLAIN) if format == "int4" else _WIDE
    return _MANY


def rows_in_registers(rounds: bool, outputs: int, has_rows: bool) -> int:
    """Return the largest number of rows that the kernel multiplies with the weight converted in registers.

    Args:
        rounds: whether the inputs may be rounded to FP8, for products in FP8.
        outputs: of the weight.
        has_rows: whether `nibble_rows` takes the weight. For an 8B model on an H200 it is faster than unpacking up to
            256 rows.
    """
    if rounds:
        return 8
    if outputs >= _HEAD:
        return 1024  # an unpacked head would take a gigabyte
    return 256 if has_rows else 128


def rows_in_fp8(inputs: int) -> int:
    """Return the largest number of rows for which the kernel is faster than the library, for a weight in blocks."""
    return 64 if inputs > 8192 else 32


def rows_tile_for(rows: int, outputs: int, inputs: int) -> RowsTile:
    """Return the sizes of a program of `nibble_rows` for a weight [outputs, inputs].

    They were the fastest of a sweep on an H200 over the weights of an 8B model. Up to 32 rows the scales multiply the
    sums, of which there are few; beyond, the numbers of W.
    """
    large = outputs * inputs >= _LARGE
    if rows <= 32:
        return RowsTile(128, 32, 8, 3, 64, 2, scale_w=False)
    if rows <= 64:
        return RowsTile(128, 64, 8, 2, 64, 2) if large else RowsTile(128, 64, 8, 4, 64, 1, scale_w=False)
    if large:
        return RowsTile(128, 128, 8, 3, 32, 2)
    return RowsTile(128, 64, 8, 4, 32, 2) if rows <= 128 else RowsTile(128, 128, 8, 4, 32, 1)
