"""4-bit floating-point weights (e2m1): MXFP4 and NVFP4. Activations stay in 16 bits.

| | codes | scales | global scale |
|---|---|---|---|
| gpt-oss (MXFP4) | `x_blocks` [experts, outputs, inputs / 32, 16] | `x_scales` [experts, outputs, inputs / 32] | |
| compressed-tensors MXFP4 | `weight_packed` [outputs, inputs / 2] | `weight_scale`, bytes | |
| compressed-tensors NVFP4 | `weight_packed` | `weight_scale`, e4m3 | `weight_global_scale`, a divisor |
| ModelOpt NVFP4 | `weight` [outputs, inputs / 2] | `weight_scale`, e4m3 | `weight_scale_2`, a factor |
"""

from __future__ import annotations

import torch

from quire.layers.env import Env
from quire.quant.base import Part
from quire.quant.formats.base import PackedPart, PartTensors
from quire.quant.forms import Fp4Weight, QuantisedWeight
from quire.quant.layouts import Fp4Layout

_NAN = 255  # as an e8m0 scale


def read_fp4(env: Env, part: Part) -> PackedPart | None:
    """Return the part if it is stored as e2m1 codes."""
    tensors = PartTensors(env, part)
    if part.index is not None:
        stacked = env.weights.stored(part.name + "_blocks")
        return StackedMxfp4Part(tensors) if stacked else None
    for codes in ("weight_packed", "weight"):
        stored = tensors.stored(codes)
        if stored and stored.dtype == torch.uint8 and not stored.kind:
            return Fp4Part(tensors, codes)
    return None


class Fp4Part:
    """A part of an MXFP4 or NVFP4 weight, by the dtype of its scales."""

    def __init__(self, tensors: PartTensors, codes: str) -> None:
        self.tensors, self.codes = tensors, codes
        outputs, inputs = tensors.part.shape
        has_global = tensors.require("weight_scale").dtype == torch.float8_e4m3fn
        group = 16 if has_global else 32
        if inputs % group or tensors.part.transposed:
            raise tensors.refuse(
                f"of shape {[outputs, inputs]} is FP4, which needs inputs in groups of {group}"
            )
        cols, width = tensors.groups(group)
        if width != group:
            raise tensors.refuse(
                f"cannot be cut to {width} columns: its blocks have {group}; use fewer ranks"
            )
        scale = tensors.scales("weight_scale", (outputs, inputs // group))
        if not has_global and bool((scale == _NAN).any()):
            raise tensors.refuse("has a scale that is not finite")
        self.scale = scale[tensors.rows, cols]
        self.global_scale = self._global_scale() if has_global else None
        tensors.skip("input_scale", "input_global_scale")
        self.layout = Fp4Layout(has_global)

    def _global_scale(self) -> float:
        is_factor = self.tensors.stored("weight_scale_2") is not None
        value = self.tensors.scales("weight_scale_2" if is_factor else "weight_global_scale").float()
        if value.numel() != 1 or float(value) <= 0:
            raise self.tensors.refuse(
                f"has a global scale of shape {list(value.shape)}; it must be one positive number"
            )
        return float(value) if is_factor else 1 / float(value)

    def fill(self, weight: QuantisedWeight) -> None:
        assert isinstance(weight, Fp4Weight)
        weight.scale.copy_(self.scale)
        if weight.global_scale is not None and self.global_scale is not None:
            weight.global_scale.fill_(self.global_scale)
        cols = self.tensors.in_blocks(self.tensors.cols, self.tensors.part.shape[1], 2, "columns")
        self.tensors.copy(weight.packed, self.codes, self.tensors.rows, cols)


class StackedMxfp4Part:
    """Rows of one expert in gpt-oss's stacks. The rows may have a step, because gate and up rows alternate there."""

    layout = Fp4Layout(has_global=False)

    def __init__(self, tensors: PartTensors) -> None:
        self.tensors, part = tensors, tensors.part
        outputs, inputs = part.shape
        self.name = part.name + "_blocks"
        stored = tensors.weights.stored(self.name)
        assert stored is not None and part.index is not None
        experts = stored.shape[0]
        self.shape = (experts, outputs, inputs // 32, 16)
        self.groups, width = tensors.groups(32)
        if inputs % 32 or width != 32:
            raise tensors.refuse(f"of shape {[outputs, inputs]} is MXFP4, which needs inputs in groups of 32")
        self.expert = slice(part.index, part.index + 1)
        scale = tensors.weights.packed(part.name + "_scales", (experts, outputs, inputs // 32), self.expert)
        if bool((scale == _NAN).any()):
            raise tensors.refuse("has a scale that is not finite")
        self.scale = scale[0][part.rows, self.groups]

    def fill(self, weight: QuantisedWeight) -> None:
        assert isinstance(weight, Fp4Weight)
        weight.scale.copy_(self.scale)
        rows, groups = self.tensors.part.rows, self.groups

        def sink(values: torch.Tensor, first: int) -> None:
            weight.packed.copy_(values[0][rows, groups].flatten(1))

        self.tensors.weights.stream(sink, self.name, self.shape, self.expert)
