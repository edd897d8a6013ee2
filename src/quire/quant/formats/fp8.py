"""FP8 weights (e4m3) with scales per tensor, per row or per 128x128 block.

| scales | written by |
|---|---|
| `weight_scale_inv` [outputs / 128, inputs / 128] | DeepSeek-V3, Qwen3-FP8, `quant_method: fp8` |
| `weight_scale` [], [1], [outputs, 1] or blocks | compressed-tensors, ModelOpt, `quant_method: fp8` |

`input_scale` is the static scale of activations, if the configuration says that they are static.
"""

from __future__ import annotations

import torch

from quire.layers.env import Env
from quire.quant.base import Part
from quire.quant.formats.base import PackedPart, PartTensors
from quire.quant.forms import FP8_BLOCK, Fp8Weight, QuantisedWeight, Rounding
from quire.quant.layouts import Fp8Layout

_DYNAMIC: dict[bool, Rounding] = {True: "block", False: "token"}


def read_fp8(env: Env, part: Part) -> PackedPart | None:
    """Return the part if it is stored in FP8."""
    stored = env.weights.stored(part.name)
    return Fp8Part(PartTensors(env, part)) if stored and stored.dtype == torch.float8_e4m3fn else None


class Fp8Part:
    """A part of an FP8 weight."""

    def __init__(self, tensors: PartTensors) -> None:
        self.tensors = tensors
        if tensors.part.transposed:
            raise tensors.refuse("is FP8 and stored [inputs, outputs], which is not supported")
        suffix = "weight_scale_inv" if tensors.stored("weight_scale_inv") else "weight_scale"
        outputs, inputs = tensors.part.shape
        scale = _as_fp32(tensors.scales(suffix))
        blocks = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(outputs, 1)
        elif scale.shape == (outputs,):
            scale = scale.unsqueeze(1)
        by_block = suffix == "weight_scale_inv" or scale.shape != (outputs, 1)
        if by_block and scale.shape != blocks and scale.shape != (outputs, 1):
            raise tensors.refuse(
                f"of shape {[outputs, inputs]} has scales {list(scale.shape)}; supported are one scale, "
                f"{outputs} (one per row), or {list(blocks)} (one per block of 128x128)"
            )
        by_block = by_block and scale.shape == blocks and scale.shape != (outputs, 1)
        if by_block:
            rows = tensors.in_blocks(tensors.rows, outputs, FP8_BLOCK, "rows")
            cols = tensors.in_blocks(tensors.cols, inputs, FP8_BLOCK, "columns")
            self.scale = scale[rows, cols]
        else:
            self.scale = scale[tensors.rows]
        self.layout = Fp8Layout(by_block, *self._rounding(by_block))

    def _rounding(self, by_block: bool) -> tuple[Rounding, float | None]:
        tensors = self.tensors
        scheme = tensors.spec.activations(tensors.module) if tensors.spec else "none"
        if scheme != "static":
            tensors.skip("input_scale")
            return ("none" if scheme == "none" else _DYNAMIC[by_block]), None
        scale = tensors.scales("input_scale").float()
        if scale.numel() != 1 or float(scale) <= 0:
            raise tensors.refuse(
                f"has an input_scale of shape {list(scale.shape)}; it must be one positive number"
            )
        return "tensor", float(scale)

    def fill(self, weight: QuantisedWeight) -> None:
        assert isinstance(weight, Fp8Weight)
        weight.scale.copy_(self.scale)
        tensors = self.tensors
        tensors.weights.copy_into(
            weight.weight, tensors.part.name, tensors.part.shape, tensors.rows, tensors.cols
        )


def _as_fp32(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as fp32; bytes are exponents (e8m0)."""
    if scale.dtype == torch.uint8:
        return (scale.int() << 23).view(torch.float32)
    return scale.float()
