"""Which products `rows_product` computes, and with which variant.

Measured on an H100 and an H200 (benchmarks/hopper_rows.py, results/h200-hopper-rows.json, h100-hopper-codes.json).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache

import torch

from quire.kernels.hopper.rows import CODE_BYTES, Variant

LEAST_ROWS = 17  # fewer are multiplied by kernels that read W without the matrix units, or with fewer rows
_STEP = 32  # of which rows of a tile are a multiple, so that a choice depends on rows divided by it only
_ROWS = (32, 64, 96, 128, 192, 256)  # of tiles of x: each takes seconds to compile
_SHORT, _LONG = 1024, 8192  # inputs up to which the library is faster sooner, and beyond which later
_SMALL = 1 << 24  # numbers of a weight of codes that is unpacked for the library sooner
_PART = 512  # fewest inputs of a part
_MOST_PARTS = 6
# Shares of the multiprocessors that clusters of 1 to 6 blocks can have, because each lies in one part of the GPU.
_REACHED = (1.0, 1.0, 0.89, 0.91, 0.83, 0.77)


def most_rows_for(format: str, outputs: int, inputs: int, gated: bool) -> int:
    """Return the largest number of rows for which the kernel is faster than other products.

    Args:
        format: of `Variant`.
        outputs, inputs: of the weight.
        gated: whether the kernel also computes the activation of a gated MLP, which saves a kernel.
    """
    if format in CODE_BYTES:
        return 256 if outputs * inputs < _SMALL else 768
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
    may be left without a block. With codes the rows may be divided too; the choice that should take least time is made.

    Args:
        format, dtype, kind, group, half: of `Variant`.
        rows: of x.
        outputs: rows of the weight.
        inputs: columns of the weight.
        sms: multiprocessors of the GPU.
    """
    if format in CODE_BYTES:
        padded = -(-rows // _STEP) * _STEP
        tile, outs, parts = _fastest(padded, outputs, inputs, CODE_BYTES[format], sms)
        return Variant(tile, outs, dtype, format, kind, group, half), parts
    padded = next(size for size in _ROWS if size >= rows)
    tiles = -(-outputs // 128)
    if tiles > sms and padded <= 128:
        return Variant(padded, 256, dtype, format, kind, group, half), 1
    parts = max(1, min(3 * sms // 4 // tiles, inputs // _PART, _MOST_PARTS))
    return Variant(padded, 128, dtype, format, kind, group, half), parts


@cache
def variants_for(
    format: str, outputs: int, inputs: int, dtype: torch.dtype, kind: str | None, sms: int,
    group: int = 0, half: int = 128,
) -> frozenset[Variant]:  # fmt: skip
    """Return the variants for all numbers of rows; the arguments are those of `variant_for`."""
    most = most_rows_for(format, outputs, inputs, kind is not None)
    return frozenset(
        variant_for(format, rows, outputs, inputs, dtype, kind, sms, group, half)[0]
        for rows in range(_STEP, most + 1, _STEP)
    )


@cache
def _fastest(rows: int, outputs: int, inputs: int, w_bytes: float, sms: int) -> tuple[int, int, int]:
    """Return the rows and outputs of a block and the parts of the inputs that should take least time."""
    return min(
        _choices(rows, outputs, inputs, sms),
        key=lambda choice: _microseconds(rows, outputs, inputs, w_bytes, sms, *choice),
    )


def _choices(rows: int, outputs: int, inputs: int, sms: int) -> Iterator[tuple[int, int, int]]:
    for tile, outs in itertools.product(_ROWS, (128, 256)):
        blocks = -(-outputs // outs) * -(-rows // tile)
        if tile * outs > 1 << 15 or (tile < 256 and tile >= 2 * rows):
            continue
        for parts in range(1, _MOST_PARTS + 1):
            if parts == 1 or (blocks * parts <= sms and parts <= inputs // _PART):
                yield tile, outs, parts


def _microseconds(
    rows: int, outputs: int, inputs: int, w_bytes: float, sms: int, tile: int, outs: int, parts: int
) -> float:
    """Return an estimate of the time of a product, in us, with constants fitted to 1,560 timed ones on an H100.

    It is for comparing choices: the one of least estimated time is 1 % slower than the fastest on average.

    A block takes 64 columns at a time: the longest of multiplying, of converting W and of the way from the L2 cache. At
    its end it adds and writes sums, those of all parts.
    """
    blocks = -(-outputs // outs) * -(-rows // tile)
    waves = math.ceil(blocks / max(sms * _REACHED[parts - 1] // parts, 1))
    multiply = 0.69e-3 / 32 * outs * tile * (1.14 if outs == 256 else 1)
    convert = 0.28 / 128 * outs
    fetch = (128 * tile + 64 * w_bytes * outs) / 54e3
    finish = 1.95 / 32768 * outs * tile * (1 if parts == 1 else 1 + 0.2 * parts)
    return waves * (inputs / 64 / parts * max(multiply, convert, fetch) + 3.9 + finish)
