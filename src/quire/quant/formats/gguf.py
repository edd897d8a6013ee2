"""Blocks of GGUF files (llama.cpp) that stay quantised: their codes and scales, without change, as groups of columns.

A block holds 32 or 256 consecutive numbers of a row. The K formats divide blocks of 256 into groups of 32 or 16, whose
scales are products of two factors; these are rounded to float16 here, as precisely as llama.cpp stores the factors.
The layouts are those of ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.layers.env import Env
from quire.quant.base import Part
from quire.quant.formats.base import PackedPart, PartTensors
from quire.quant.forms import Fp4Weight, IntGroupWeight, QuantisedWeight, pack4
from quire.quant.layouts import FormLayout, Fp4Layout, IntGroupLayout

# Codes [rows, numbers] uint8, scales [rows, groups], and offsets [rows, groups] or None.
Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A block format: numbers and bytes of a block, the layout in memory, and the function that reads blocks.

    `unpack` maps blocks, uint8 [rows, blocks, bytes], to the weight's parts.
    """

    numbers: int
    bytes: int
    layout: FormLayout
    unpack: Callable[[torch.Tensor], Unpacked]

    @property
    def bits(self) -> float:
        """Bits of a number in memory, with its share of a scale."""
        weight = self.layout.allocate((), 1, self.numbers, torch.device("cpu"))
        return 8 * weight.nbytes / self.numbers


def read_gguf(env: Env, part: Part) -> PackedPart | None:
    """Return the part if it is stored as blocks of a GGUF file."""
    stored = env.weights.stored(part.name)
    return GgufPart(PartTensors(env, part), stored.kind) if stored and stored.kind else None


class GgufPart:
    """A part of a weight in a GGUF file. Rows of blocks are always outputs, even if the part is `transposed`."""

    def __init__(self, tensors: PartTensors, kind: str) -> None:
        self.tensors, self.kind = tensors, KINDS[kind]
        self.layout = self.kind.layout
        numbers = self.kind.numbers
        if tensors.part.shape[1] % numbers:
            raise tensors.refuse(
                f"of shape {list(tensors.part.shape)} is {kind}, which has blocks of {numbers} inputs"
            )
        self.blocks = tensors.in_blocks(tensors.cols, tensors.part.shape[1], numbers, "columns")

    def fill(self, weight: QuantisedWeight) -> None:
        tensors, kind = self.tensors, self.kind
        row_bytes = tensors.part.shape[1] // kind.numbers * kind.bytes
        cols = slice(self.blocks.start * kind.bytes, self.blocks.stop * kind.bytes)

        def sink(values: torch.Tensor, first: int) -> None:
            blocks = values.to(weight.device).unflatten(1, (-1, kind.bytes))
            codes, scale, offset = kind.unpack(blocks)
            part = weight.rows(first, first + values.shape[0])
            assert isinstance(part, (Fp4Weight, IntGroupWeight))
            part.packed.copy_(codes if isinstance(part, IntGroupWeight) and part.bits == 8 else pack4(codes))
            part.scale.copy_(scale)
            if isinstance(part, IntGroupWeight) and part.offset is not None and offset is not None:
                part.offset.copy_(offset)

        tensors.weights.stream(
            sink, tensors.part.name, (tensors.part.shape[0], row_bytes), tensors.rows, cols
        )


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 numbers at byte `at` of blocks [rows, blocks, bytes], as fp32 [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(bytes_: torch.Tensor) -> torch.Tensor:
    """Return the low halves of bytes [..., n], then the high ones: [..., 2 n]."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1)


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    return (blocks[..., 2:] ^ 128).flatten(1), _half(blocks, 0).flatten(1), None  # from signed to plus 128


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    return _halves(blocks[..., 2:]).flatten(1), _half(blocks, 0).flatten(1), None


def _mxfp4(blocks: torch.Tensor) -> Unpacked:
    return _halves(blocks[..., 1:]).flatten(1), blocks[..., 0], None


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and offsets of blocks whose first 16 bytes are two factors and twelve bytes of 6 bits."""
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat((low & 63, rest & 15 | low >> 6 << 4), -1)
    least = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), -1)
    return (_half(blocks, 0) * scale).flatten(1), (-_half(blocks, 2) * least).flatten(1)


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    codes = _halves(blocks[..., 16:].unflatten(-1, (4, 32)))
    return codes.flatten(1), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    codes = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifth = (blocks[..., None, 16:48] >> shifts & 1) << 4  # one bit of each of 32 bytes, for eight groups
    return (codes | fifth).flatten(1), *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> Unpacked:
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64)))  # of each half block, 128 numbers
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-2) << 4
    scale = _half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8)
    return ((low | high) + 96).flatten(1), scale.flatten(1), None  # codes are stored plus 32, here plus 128


_FP16 = torch.float16
KINDS = {
    "Q8_0": BlockKind(32, 34, IntGroupLayout(8, 32, _FP16), _q8_0),
    "Q4_0": BlockKind(32, 18, IntGroupLayout(4, 32, _FP16), _q4_0),
    "Q4_K": BlockKind(256, 144, IntGroupLayout(4, 32, _FP16, has_offset=True), _q4_k),
    "Q5_K": BlockKind(256, 176, IntGroupLayout(8, 32, _FP16, has_offset=True), _q5_k),
    "Q6_K": BlockKind(256, 210, IntGroupLayout(8, 16, _FP16), _q6_k),
    "MXFP4": BlockKind(32, 17, Fp4Layout(has_global=False), _mxfp4),
}
