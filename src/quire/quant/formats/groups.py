"""4- and 8-bit integers with a scale per group of columns: GPTQ, AWQ, and compressed-tensors `pack-quantized`.

All store int32 numbers that hold 32 / bits codes. They differ in the direction and order of packing:

| | codes | scales | zero points |
|---|---|---|---|
| GPTQ | `qweight` [inputs / n, outputs] | `scales` [groups, outputs] | `qzeros` [groups, outputs / n], minus 1 in version 1 |
| AWQ | `qweight` [inputs, outputs / n], order 0 2 4 6 1 3 5 7 | `scales` [groups, outputs] | `qzeros`, packed like the codes |
| pack-quantized | `weight_packed` [outputs, inputs / n] | `weight_scale` [outputs, groups] | `weight_zero_point` [outputs / n, groups] |

`g_idx` [inputs] names the group of each input, if the groups are not consecutive (GPTQ's `desc_act`). The columns are
then sorted by group while they are loaded, and the product permutes its input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from quire.layers.env import Env
from quire.quant.base import Part
from quire.quant.formats.base import PackedPart, PartTensors
from quire.quant.forms import IntGroupWeight, QuantisedWeight, pack4
from quire.quant.layouts import IntGroupLayout

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in an int32 of output 0, 1, ...


def read_groups(env: Env, part: Part) -> PackedPart | None:
    """Return the part if it is stored as GPTQ, AWQ or pack-quantized codes."""
    tensors = PartTensors(env, part)
    packed = tensors.stored("weight_packed")
    if packed and packed.dtype == torch.int32:
        return PackQuantizedPart(tensors)
    if tensors.stored("qweight") is None:
        return None
    return (AwqPart if env.quantization and env.quantization.method == "awq" else GptqPart)(tensors)


class GroupedPart(ABC):
    """A part whose scales, zero points and order of columns are known.

    Args:
        tensors: the part's tensors.
        bits: of a code.
        scale: [outputs, groups] of the whole matrix.
        zero: integers [outputs, groups] of the whole matrix; None: 2^(bits - 1).
        group_of: the group of each input, [inputs]; None: consecutive.
    """

    def __init__(
        self,
        tensors: PartTensors,
        bits: int,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group_of: torch.Tensor | None,
    ) -> None:
        self.tensors, self.bits = tensors, bits
        outputs, inputs = tensors.part.shape
        if scale.dim() != 2 or not scale.shape[1] or inputs % scale.shape[1] or scale.shape[0] != outputs:
            raise tensors.refuse(
                f"of shape {[outputs, inputs]} has scales for {list(scale.shape)} rows and groups, which do not divide it"
            )
        group = inputs // scale.shape[1]
        self.order = None if group_of is None else self._order(group_of.long(), group)
        if self.order is not None and (tensors.cols.start or tensors.cols.stop != inputs):
            raise tensors.refuse(
                "has groups of scattered columns (desc_act), which cannot be cut over ranks; use one rank"
            )
        groups, width = tensors.groups(group)
        self.scale = scale[tensors.rows, groups]
        if zero is not None and bool((zero == 1 << (bits - 1)).all()):
            zero = None
        self.zero = None if zero is None else zero[tensors.rows, groups].to(torch.uint8)
        self.layout = IntGroupLayout(
            bits,
            width,
            scale.dtype,
            has_zero=zero is not None,
            permutation=None if self.order is None else self.order.numpy().tobytes(),
        )

    def _order(self, group_of: torch.Tensor, group: int) -> torch.Tensor | None:
        """Return the columns sorted by group; None if they are sorted already."""
        inputs = self.tensors.part.shape[1]
        if group_of.shape != (inputs,) or not torch.equal(
            group_of.sort().values, torch.arange(inputs) // group
        ):
            raise self.tensors.refuse(
                f"has a g_idx that does not put {group} of its {inputs} inputs into each of {inputs // group} groups"
            )
        order = group_of.argsort(stable=True)
        return None if torch.equal(order, torch.arange(inputs)) else order

    def fill(self, weight: QuantisedWeight) -> None:
        assert isinstance(weight, IntGroupWeight)
        weight.scale.copy_(self.scale)
        if weight.zero is not None:  # a weight with zero points may have parts without
            weight.zero.copy_(torch.tensor(1 << (self.bits - 1)) if self.zero is None else self.zero)
        if weight.permutation is not None:
            identity = torch.arange(weight.shape[-1])
            weight.permutation.copy_(identity if self.order is None else self.order)
        self.load_codes(weight)

    @abstractmethod
    def load_codes(self, weight: IntGroupWeight) -> None:
        """Load `weight.packed`."""

    def store(self, weight: IntGroupWeight, codes: torch.Tensor, first: int) -> None:
        """Write codes [outputs, n] to the columns from `first` on; with an order, of all columns."""
        if self.order is not None:
            codes = codes[:, self.order.to(codes.device)]
        packed = pack4(codes) if self.bits == 4 else codes
        begin = first * self.bits // 8
        weight.packed[:, begin : begin + packed.shape[1]].copy_(packed)


class GptqPart(GroupedPart):
    """A part of a GPTQ weight (arXiv:2210.17323), in the file formats `gptq` and `gptq_v2`."""

    def __init__(self, tensors: PartTensors) -> None:
        outputs, inputs = tensors.part.shape
        stored = tensors.require("qweight")
        bits = _bits(tensors, stored.shape[0] * 32, inputs, stored.shape[-1] == outputs)
        self.each = 32 // bits
        shift = tensors.spec.zero_shift if tensors.spec else 0
        scale = tensors.scales("scales").t()
        zero = None
        if tensors.stored("qzeros"):
            packed = tensors.read("qzeros", (scale.shape[1], outputs // self.each))
            zero = ((unpack_int32(packed, bits).int() + shift) & ((1 << bits) - 1)).t()
        group_of = tensors.read("g_idx", (inputs,)) if tensors.stored("g_idx") else None
        super().__init__(tensors, bits, scale, zero, group_of)

    def load_codes(self, weight: IntGroupWeight) -> None:
        tensors, each = self.tensors, self.each
        rows = tensors.in_blocks(tensors.cols, tensors.part.shape[1], each, "columns")

        def sink(values: torch.Tensor, first: int) -> None:  # [inputs / n, outputs]
            codes = unpack_int32(values.to(weight.device).t(), self.bits)
            self.store(weight, codes, first * each)

        whole = rows.stop - rows.start if self.order is not None else 1
        shape = tensors.require("qweight").shape
        tensors.weights.stream(sink, tensors.name("qweight"), shape, rows, tensors.rows, multiple=whole)


class AwqPart(GroupedPart):
    """A part of an AWQ weight (arXiv:2306.00978), in the file format of its version `gemm`."""

    def __init__(self, tensors: PartTensors) -> None:
        outputs, inputs = tensors.part.shape
        stored = tensors.require("qweight")
        bits = _bits(tensors, stored.shape[-1] * 32, outputs, stored.shape[0] == inputs)
        if bits != 4:
            raise tensors.refuse(f"is AWQ with {bits} bits; supported are 4")
        scale = tensors.scales("scales").t()
        zero = None
        if tensors.stored("qzeros"):
            zero = _awq_codes(tensors.read("qzeros", (scale.shape[1], outputs // 8))).int().t()
        super().__init__(tensors, bits, scale, zero, None)

    def load_codes(self, weight: IntGroupWeight) -> None:
        tensors = self.tensors
        outs = tensors.in_blocks(tensors.rows, tensors.part.shape[0], 8, "rows")

        def sink(values: torch.Tensor, first: int) -> None:  # [inputs, outputs / 8]
            self.store(weight, _awq_codes(values.to(weight.device)).t(), first)

        shape = tensors.require("qweight").shape
        tensors.weights.stream(sink, tensors.name("qweight"), shape, tensors.cols, outs, multiple=2)


class PackQuantizedPart(GroupedPart):
    """A part of a `pack-quantized` weight of compressed-tensors. Codes and zero points are stored plus 2^(bits - 1)."""

    def __init__(self, tensors: PartTensors) -> None:
        outputs, inputs = tensors.part.shape
        stored = tensors.require("weight_packed")
        bits = _bits(tensors, stored.shape[-1] * 32, inputs, stored.shape[0] == outputs)
        tensors.skip("weight_shape")
        scale = tensors.scales("weight_scale")
        scale = scale.reshape(outputs, -1) if scale.numel() % outputs == 0 else scale
        zero = None
        if tensors.stored("weight_zero_point"):
            packed = tensors.read("weight_zero_point")
            if packed.dtype == torch.int32:
                zero = unpack_int32(packed.t(), bits).int().t()[:outputs]
            else:  # int8, not packed
                zero = packed.int() + (1 << (bits - 1))
        group_of = tensors.read("weight_g_idx", (inputs,)) if tensors.stored("weight_g_idx") else None
        super().__init__(tensors, bits, scale, zero, group_of)

    def load_codes(self, weight: IntGroupWeight) -> None:
        tensors = self.tensors
        cols = tensors.in_blocks(tensors.cols, tensors.part.shape[1], 32 // self.bits, "columns")
        if self.order is None:  # the bytes of an int32 are in our order
            tensors.copy(weight.packed, "weight_packed", tensors.rows, cols, torch.uint8)
            return

        def sink(values: torch.Tensor, first: int) -> None:
            codes = unpack_int32(values.to(weight.device), self.bits)
            self.store(weight.rows(first, first + values.shape[0]), codes, 0)

        shape = tensors.require("weight_packed").shape
        tensors.weights.stream(sink, tensors.name("weight_packed"), shape, tensors.rows, cols)


def unpack_int32(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in int32 numbers [rows, n], lowest bits first: uint8 [rows, n * 32 / bits]."""
    codes = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def _awq_codes(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes in AWQ's int32 numbers [rows, n]: uint8 [rows, 8 n]."""
    return unpack_int32(packed, 4).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)


def _bits(tensors: PartTensors, stored_bits: int, codes: int, fits: bool) -> int:
    """Return the bits of a code, from the size of the packed tensor."""
    bits, rest = divmod(stored_bits, codes)
    if not fits or rest or bits not in (4, 8):
        raise tensors.refuse(
            f"of shape {list(tensors.part.shape)} is packed into {bits if fits else 'an unknown number of'} bits a "
            "number; supported are 4 and 8"
        )
    return bits
