"""INT8 weights with one scale per row, multiplied with activations in INT8 (compressed-tensors `int-quantized`)."""

from __future__ import annotations

import torch

from quire.layers.env import Env
from quire.quant.base import Part
from quire.quant.formats.base import PackedPart, PartTensors
from quire.quant.forms import Int8Weight, QuantisedWeight
from quire.quant.layouts import Int8Layout


def read_int8(env: Env, part: Part) -> PackedPart | None:
    """Return the part if it is stored as int8 numbers."""
    stored = env.weights.stored(part.name)
    return Int8Part(PartTensors(env, part)) if stored and stored.dtype == torch.int8 else None


class Int8Part:
    """A part of an INT8 weight: `weight` [outputs, inputs], `weight_scale` [outputs, 1], [outputs] or one number."""

    def __init__(self, tensors: PartTensors) -> None:
        self.tensors = tensors
        outputs = tensors.part.shape[0]
        scale = tensors.scales("weight_scale").float()
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(outputs, 1)
        if scale.numel() != outputs:
            raise tensors.refuse(
                f"is int8 with scales {list(scale.shape)}; supported are one scale, or {outputs} (one per row)"
            )
        if tensors.part.transposed or tensors.stored("weight_zero_point"):
            layout = "[inputs, outputs]" if tensors.part.transposed else "with zero points"
            raise tensors.refuse(f"is int8 and stored {layout}, which is not supported")
        self.scale = scale.reshape(outputs, 1)[tensors.rows]
        scheme = tensors.spec.activations(tensors.module) if tensors.spec else "none"
        if scheme == "static":
            raise tensors.refuse("needs static INT8 activations, which are not supported; dynamic ones are")
        self.layout = Int8Layout("none" if scheme == "none" else "token")

    def fill(self, weight: QuantisedWeight) -> None:
        assert isinstance(weight, Int8Weight)
        weight.scale.copy_(self.scale)
        tensors = self.tensors
        tensors.weights.copy_into(
            weight.weight, tensors.part.name, tensors.part.shape, tensors.rows, tensors.cols
        )
