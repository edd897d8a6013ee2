"""Python interface of quantised.c: packed weights of 4 or 8 bits, and their structures."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from quire.kernels.cpu.ops import LANES, CFunction, CpuKernels, compare_layout

_P, _N, _I = c_void_p, c_int64, c_int32
_TILE_INPUTS = 64  # inputs that the processor's tiles multiply at once
_BLOCKS_AT_ONCE = 256  # that are packed, which bounds the memory it takes
_HUGE_PAGE, _MADV_HUGEPAGE = 2 << 20, 14  # of Linux
_MOST_UNIT = 32  # inputs that share a scale of x
# The sum of products of 8-bit numbers, 255 * 127 each, must fit into 31 bits.
MOST_INPUTS = 2**31 // (255 * 127)


class CCodedWeight(ctypes.Structure):
    _fields_ = [
        ("codes", _P), ("scales", _P), ("offsets", _P), ("factors", _P), ("bias", _P), ("norm", _P),
        ("inputs", _N), ("padded", _N), ("outputs", _N), ("group", _N), ("unit", _N),
        ("bits", _I), ("table", _I), ("zero", _I), ("half", _I), ("kind", _I),
    ]  # fmt: skip


class CCodedProduct(ctypes.Structure):
    _fields_ = [
        ("weight", _P), ("x", _P), ("residual", _P), ("add", _P), ("sum", _P), ("y", _P), ("rounded", _P),
        ("rows", _N), ("failed", _I),
    ]  # fmt: skip


class CodedFunctions:
    """The functions of quantised.c."""

    def __init__(self, kernels: CpuKernels) -> None:
        library = kernels.library
        compare_layout(library.coded_layout, (CCodedWeight, CCodedProduct))
        names = ("coded_product", "many_rows_product", "many_rows_bytes")
        for name in names:
            getattr(library, name).argtypes = [_P]
        library.many_rows_bytes.restype = _N
        self.few: CFunction = library.coded_product
        self.many: CFunction = library.many_rows_product
        self.many_rows_bytes = library.many_rows_bytes


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight as quantised.c reads it. See `pack_codes` for its values."""

    codes: torch.Tensor  # uint8, in blocks of 16 outputs
    scales: torch.Tensor | None  # fp16 [blocks, groups, 16]
    offsets: torch.Tensor | None  # fp16 [blocks, groups, 16]
    factors: torch.Tensor  # fp32 [blocks * 16]
    outputs: int
    inputs: int
    padded: int
    group: int
    bits: int
    table: int
    zero: int

    @property
    def unit(self) -> int:
        """Return the number of inputs that share a scale of x."""
        return self.padded if self.scales is None else min(self.group, _MOST_UNIT)


def pack_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    zero: int = 0,
    e2m1: bool = False,
    per_row: bool = False,
) -> CodedWeight:
    """Pack a weight that is `(codes - zero) * scales`, or `codes * scales - offsets`.

    Args:
        codes: uint8 [outputs, inputs], below 2^bits.
        scales: [outputs, groups]; groups of a length that `can_pack_codes` accepts.
        offsets: [outputs, groups], or None.
        bits: 4 or 8.
        zero: the code that stands for 0, if there are no offsets.
        e2m1: whether codes are 4-bit floats, whose values replace them.
        per_row: whether inputs get one scale per row. It takes 8 bits, one scale per output and no offsets.
    """
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    group = inputs // groups
    step = _TILE_INPUTS if per_row else max(group, _MOST_UNIT)
    padded, blocks = -(-inputs // step) * step, -(-outputs // LANES)
    packed = in_huge_pages(torch.empty(blocks, padded * LANES * bits // 8, dtype=torch.uint8))
    for first in range(0, blocks, _BLOCKS_AT_ONCE):
        last = min(first + _BLOCKS_AT_ONCE, blocks)
        rows = codes[first * LANES : last * LANES]
        box = torch.zeros((last - first) * LANES, padded, dtype=torch.uint8)
        box[: rows.shape[0], :inputs] = rows
        packed[first:last] = _interleave(box, bits).reshape(last - first, -1)
    if per_row:
        factors = _pad(scales.float(), blocks * LANES, 1).reshape(-1)
        return CodedWeight(packed, None, None, factors, outputs, inputs, padded, padded, bits, 0, zero)
    # fp16 has few exponents, so each output's scales are multiplied by a power of two.
    scales = scales.float()
    largest = scales.abs().amax(1, keepdim=True)
    if offsets is not None:
        offsets = offsets.float()
        largest = torch.maximum(largest, offsets.abs().amax(1, keepdim=True) / 256)
    power = torch.exp2(torch.floor(torch.log2(largest.clamp_min(2.0**-120))))
    if e2m1:
        scales, zero = scales / 2, 12  # the table holds twice the values
    groups_padded = padded // group

    def in_blocks(values: torch.Tensor) -> torch.Tensor:
        whole_blocks = _pad(values / power, blocks * LANES, groups_padded)
        return whole_blocks.view(blocks, LANES, -1).transpose(1, 2).contiguous().half()

    return CodedWeight(
        packed, in_blocks(scales), None if offsets is None else in_blocks(offsets),
        _pad(power, blocks * LANES, 1).reshape(-1), outputs, inputs, padded, group, bits, int(e2m1),
        1 if offsets is not None else zero,
    )  # fmt: skip


def can_pack_codes(group: int, inputs: int) -> bool:
    """Return whether the kernels read groups of `group` inputs, of which there are `inputs`."""
    return (group == 16 or group % _MOST_UNIT == 0) and inputs % group == 0


def in_huge_pages(memory: torch.Tensor) -> torch.Tensor:
    """Return a new tensor after asking the system for huge pages for it: they are read 5 to 15 % faster."""
    begin = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (memory.data_ptr() + memory.nbytes - begin) // _HUGE_PAGE * _HUGE_PAGE
    if size > 0:
        ctypes.CDLL(None).madvise(
            c_void_p(begin), ctypes.c_size_t(size), _MADV_HUGEPAGE
        )  # a refusal costs only speed
    return memory


def _pad(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    padded = values.new_zeros(rows, columns)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded


def _interleave(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [blocks, inputs / 4, 16, 4] bytes of codes [blocks * 16, inputs], or nibbles of 8 inputs per line."""
    lines = codes.view(-1, LANES, codes.shape[1] // 4, 4).transpose(1, 2)
    if bits == 8:
        return lines.contiguous()
    pairs = lines.reshape(lines.shape[0], lines.shape[1] // 2, 2, LANES, 4)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4
