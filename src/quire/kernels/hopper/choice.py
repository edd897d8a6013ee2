"""Which products `rows_product` computes, and with which variant.

Measured on an H100 and an H200 (benchmarks/hopper_rows.py, results/h200-hopper-rows.json).
"""

from __future__ import annotations

import torch

from quire.kernels.hopper.rows import Variant

LEAST_ROWS = 17  # fewer are multiplied by kernels that read W without the matrix units, or with fewer rows
_ROWS = (32, 64, 96, 128, 192, 256)  # of variants: each takes seconds to compile
_SHORT, _LONG = 1024, 8192  # inputs up to which the library is faster sooner, and beyond which later
_PART = 512  # fewest inputs of a part
_MOST_PARTS = 6


def most_rows_for(format: str, inputs: int, gated: bool) -> int:
    """Return the largest number of rows for which the kernel is faster than other products.

    Args:
        format: of `Variant`.
        inputs: of the weight.
        gated: whether the kernel also computes the activation of a gated MLP, which saves a kernel.
    """
    if format == "int4":
        return 256 if inputs >= 4096 else 128
    if format == "fp8":
        return 64
    if gated:
        return 128 if inputs > _SHORT else 64
    return 32 if inputs <= _SHORT else 128 if inputs > _LONG else 64


def variant_for(
    format: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, kind: str | None, sms: int,
    group: int = 0, half: int = 128,
) -> tuple[Variant, int]:  # fmt: skip
    """Return the variant that multiplies `rows` rows with a weight [outputs, inputs], and the blocks of its clusters.

    Blocks of 256 outputs read x half as often, so a weight that gives every multiprocessor a block has them. Otherwise
    the inputs are divided. The blocks of a cluster lie in one part of the GPU, so that a quarter of the multiprocessors
    may be left without a block.

    Args:
        format, dtype, kind, group, half: of `Variant`.
        rows: of x.
        outputs: rows of the weight.
        inputs: columns of the weight.
        sms: multiprocessors of the GPU.
    """
    padded = next(size for size in _ROWS if size >= rows)
    tiles = -(-outputs // 128)
    if tiles > sms and padded <= 128:
        return Variant(padded, 256, dtype, format, kind, group, half), 1
    parts = max(1, min(3 * sms // 4 // tiles, inputs // _PART, _MOST_PARTS))
    return Variant(padded, 128, dtype, format, kind, group, half), parts
