"""The forms in which quantised weights are kept in memory, whatever file format they came from.

A format (quant/formats/) reads a checkpoint's tensors into one of these classes; a product (quant/products.py)
multiplies with it. Every class describes one matrix [outputs, inputs], or a stack of experts' matrices
[experts, outputs, inputs]: then every tensor has a leading dimension of experts. All tensors are contiguous and on the
model's device. `dequantised` defines what the numbers mean, and is the oracle of every kernel.

| class | numbers | scales | read from |
|---|---|---|---|
| `Fp8Weight` | e4m3 | per row, or per 128x128 block | FP8 checkpoints of every kind |
| `Int8Weight` | int8 | per row | INT8 W8A8 |
| `IntGroupWeight` | 4 or 8 bits | per row and group of columns | AWQ, GPTQ, compressed-tensors, GGUF |
| `Fp4Weight` | e2m1 | per row and group of 16 or 32 columns | MXFP4, NVFP4, GGUF |
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal, Protocol, Self

import torch

FP8_BLOCK = 128  # rows and columns of a block of `Fp8Weight`
FP8_MAX = 448.0  # largest e4m3 number

# How the format rounds activations before the product:
#   none    not at all
#   tensor  to e4m3 with the static scale `input_scale`
#   token   with one scale per token, its largest magnitude / FP8_MAX (to e4m3) or / 127 (to int8)
#   block   to e4m3 with one scale per token and 128 columns
Rounding = Literal["none", "tensor", "token", "block"]

# e2m1 numbers by their code; the fourth bit is the sign.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class QuantisedWeight(Protocol):
    """A matrix, or a stack of experts' matrices, of numbers with few bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[outputs, inputs], or [experts, outputs, inputs]."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    @property
    def label(self) -> str:
        """Return a short name of the form for messages, such as `int4, groups of 128`."""
        ...

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers as a tensor of `shape`, computed in fp32 and rounded to `dtype`."""
        ...

    def rows(self, first: int, last: int) -> Self:
        """Return rows `first` to `last` of a matrix: views of the same memory."""
        ...

    def expert(self, index: int | torch.Tensor) -> Self:
        """Return the matrix of one expert of a stack, as views of the same memory; for indices [n], a copy of n."""
        ...


class _Form:
    """What the forms share: properties that follow from their tensors."""

    __slots__ = ()

    _FOR_ALL_ROWS = ("permutation", "input_scale")

    def rows(self, first: int, last: int) -> Self:
        total, cut = self.shape[-2], {}  # type: ignore[attr-defined]
        for name, tensor in self._tensors():
            if name not in self._FOR_ALL_ROWS:
                step = FP8_BLOCK if tensor.shape[-2] != total else 1
                cut[name] = tensor[..., first // step : -(-last // step), :]
        return replace(self, **cut)  # type: ignore[type-var]

    def expert(self, index: int | torch.Tensor) -> Self:
        return replace(self, **{name: t[index] for name, t in self._tensors() if name != "input_scale"})  # type: ignore[type-var]

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._tensors())


@dataclass(frozen=True, slots=True)
class Fp8Weight(_Form):
    """value = weight * scale.

    Args:
        weight: float8_e4m3fn [outputs, inputs].
        scale: fp32 [outputs, 1], one per row, or [ceil(outputs / 128), ceil(inputs / 128)], one per block. A scale
            of a whole tensor is repeated for each row.
        rounding: of activations. Blocks come with `block` or `none`, rows with any other.
        input_scale: fp32 scalar tensor, with rounding `tensor` only.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rounding: Rounding = "none"
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def by_block(self) -> bool:
        """Return whether scales belong to 128x128 blocks."""
        return not by_row(self.scale, self.weight)

    @property
    def label(self) -> str:
        return "fp8, blocks of 128x128" if self.by_block else "fp8, scales per row"

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = self.weight.float()
        if not self.by_block:
            return (values * self.scale).to(dtype)
        outputs, inputs = values.shape[-2:]
        scale = self.scale.repeat_interleave(FP8_BLOCK, -2)[..., :outputs, :]
        return (values * scale.repeat_interleave(FP8_BLOCK, -1)[..., :inputs]).to(dtype)


def by_row(scale: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `scale` has one number for each row of `weight`; ambiguous shapes mean the same either way."""
    return scale.shape[-1] == 1 and scale.shape[-2] == weight.shape[-2]


@dataclass(frozen=True, slots=True)
class Int8Weight(_Form):
    """value = weight * scale.

    Args:
        weight: int8 [outputs, inputs].
        scale: fp32 [outputs, 1].
        rounding: of activations, `token` or `none`.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rounding: Rounding = "token"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def label(self) -> str:
        return "int8, scales per row"

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.weight.float() * self.scale).to(dtype)


@dataclass(frozen=True, slots=True)
class IntGroupWeight(_Form):
    """value = scale * (code - zero), or scale * code + offset.

    Activations are never rounded. Consecutive columns form groups of equal size, `group_size`.

    Args:
        packed: uint8 codes: [outputs, inputs] with 8 bits; [outputs, inputs / 2] with 4 bits, where the low half of a
            byte is the even column.
        bits: 4 or 8.
        scale: float16, bfloat16 or fp32 [outputs, groups].
        zero: uint8 [outputs, groups]; None: 2^(bits - 1) everywhere (symmetric), unless there is an offset.
        offset: dtype of scale, [outputs, groups]. With it, zero is None and means 0.
        permutation: int64 [inputs], or None. Column i of the matrix multiplies input `permutation[i]`: the product is
            x[:, permutation] @ value^T. A stack of experts has [experts, inputs].
    """

    packed: torch.Tensor
    bits: int
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    permutation: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 8 // self.bits)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def label(self) -> str:
        return f"int{self.bits}, groups of {self.group_size}"

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers in the order of the inputs, that is without the permutation."""
        codes = (unpack4(self.packed) if self.bits == 4 else self.packed).unflatten(-1, (-1, self.group_size))
        scale = self.scale.float().unsqueeze(-1)
        if self.offset is not None:
            values = codes.float().mul_(scale).add_(self.offset.float().unsqueeze(-1))
        else:
            zero = 1 << (self.bits - 1) if self.zero is None else self.zero.float().unsqueeze(-1)
            values = codes.float().sub_(zero).mul_(scale)
        values = values.flatten(-2).to(dtype)
        if self.permutation is None:
            return values
        back = self.permutation.argsort(-1).unsqueeze(-2).expand(values.shape)
        return values.gather(-1, back)


@dataclass(frozen=True, slots=True)
class Fp4Weight(_Form):
    """value = e2m1 * scale, times `global_scale` with NVFP4. Activations are never rounded.

    Args:
        packed: uint8 [outputs, inputs / 2]: codes of e2m1 numbers, the low half of a byte is the even column.
        scale: MXFP4: uint8 [outputs, inputs / 32], e8m0: 2^(scale - 127). NVFP4: float8_e4m3fn [outputs, inputs / 16].
        global_scale: NVFP4: fp32 [outputs, 1]; MXFP4: None.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def label(self) -> str:
        return "mxfp4" if self.global_scale is None else "nvfp4"

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = _fp4_table(self.device)[unpack4(self.packed).int()].unflatten(-1, (-1, self.group_size))
        if self.global_scale is None:
            scale = (self.scale.int() << 23).view(torch.float32)  # the exponent of an fp32 number
        else:
            scale = self.scale.float() * self.global_scale
        return (values * scale.unsqueeze(-1)).flatten(-2).to(dtype)


@cache
def _fp4_table(device: torch.device) -> torch.Tensor:
    """Return `FP4_VALUES` on `device`; kept, because a graph that is being captured cannot copy it there."""
    return torch.tensor(FP4_VALUES, device=device)


def pack4(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes 0-15, uint8 [..., inputs], into bytes [..., inputs / 2]; the low half is the even column."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack4(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of `pack4`, uint8 [..., inputs]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
