"""Conversion of plain weights while they are loaded, piece by piece, so that a whole plain weight is never resident.

`fp8`, `fp8-block` and `int8` round to the nearest number. `int4` searches the range of each group that loses least.
"""

from __future__ import annotations

import re

import torch

from quire.layers.env import Env
from quire.quant.base import Part
from quire.quant.formats.base import PackedPart, PartTensors
from quire.quant.forms import (
    FP8_BLOCK,
    FP8_MAX,
    Fp8Weight,
    Int8Weight,
    IntGroupWeight,
    QuantisedWeight,
    pack4,
)
from quire.quant.layouts import FormLayout, Fp8Layout, Int8Layout, IntGroupLayout
from quire.quant.rounding import INT8_MAX

# Routers are small and decide much.
_KEPT = re.compile(r"\.(gate|router|shared_expert_gate|wpe)\.weight$")
_HEADS = re.compile(r"(^|\.)(lm_head|embed_tokens|wte)\.weight$")
_TINY = 1e-12  # scale of zeros
_FRACTIONS = tuple(1 - i / 20 for i in range(8))  # of the range of a group, tried in turn


def convert_plain(env: Env, part: Part) -> PackedPart | None:
    """Return the part as it is converted; None if conversion is off, or leaves this weight as it is."""
    spec = env.quantization
    if spec is None or spec.convert is None or part.index is not None or _KEPT.search(part.name):
        return None
    convert = spec.convert
    if _HEADS.search(part.name):  # a head in 4 bits would lose more than all other matrices together
        if convert not in ("int8", "int4"):
            return None
        convert = "int8"
    inputs = part.num_cols
    if convert == "int4":
        group = group_size(inputs, spec.group_size)
        if group is None:
            return None
        return ConvertedPart(env, part, IntGroupLayout(4, group, torch.float16, has_zero=True))
    if convert == "int8":
        return ConvertedPart(env, part, Int8Layout("token"))
    by_block = convert == "fp8-block"
    return ConvertedPart(env, part, Fp8Layout(by_block, "block" if by_block else "token"))


def group_size(inputs: int, wanted: int) -> int | None:
    """Return the largest size of a group, at most `wanted`, of which `inputs` is a multiple; None if none is useful."""
    return next((n for n in range(min(wanted, inputs), 15, -1) if inputs % n == 0 and n % 2 == 0), None)


class ConvertedPart:
    """A part of a plain weight that is quantised when it arrives."""

    def __init__(self, env: Env, part: Part, layout: FormLayout) -> None:
        self.tensors, self.dtype, self.layout = PartTensors(env, part), env.dtype, layout

    def fill(self, weight: QuantisedWeight) -> None:
        part, tensors = self.tensors.part, self.tensors

        def sink(values: torch.Tensor, first: int) -> None:
            values = values.to(weight.device)
            values = values.t() if part.transposed else values
            quantise_into(weight.rows(first, first + values.shape[0]), values.to(self.dtype))

        if part.transposed:
            shape, whole = part.shape[::-1], part.num_cols
            tensors.weights.stream(sink, part.name, shape, tensors.cols, tensors.rows, multiple=whole)
        else:
            step = self.layout.row_step
            tensors.weights.stream(sink, part.name, part.shape, tensors.rows, tensors.cols, multiple=step)


def quantise_into(weight: QuantisedWeight, values: torch.Tensor) -> None:
    """Round `values` [outputs, inputs] to the form and layout of `weight`, and store them there."""
    values = values.float()
    if isinstance(weight, Int8Weight):
        scale = (values.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_(min=_TINY)
        weight.weight.copy_((values / scale).round_())
        weight.scale.copy_(scale)
    elif isinstance(weight, Fp8Weight):
        _quantise_fp8(weight, values)
    elif isinstance(weight, IntGroupWeight):
        scale, zero, codes = search_groups(values.unflatten(-1, (-1, weight.group_size)), weight.scale.dtype)
        weight.packed.copy_(pack4(codes.flatten(-2)))
        weight.scale.copy_(scale)
        assert weight.zero is not None
        weight.zero.copy_(zero)
    else:
        raise TypeError(f"no conversion to {weight.label}")


def _quantise_fp8(weight: Fp8Weight, values: torch.Tensor) -> None:
    if not weight.by_block:
        scale = (values.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_(min=_TINY)
        weight.scale.copy_(scale)
        weight.weight.copy_((values / scale).clamp_(-FP8_MAX, FP8_MAX))
        return
    outputs, inputs = values.shape
    padded = torch.nn.functional.pad(values, (0, -inputs % FP8_BLOCK, 0, -outputs % FP8_BLOCK))
    blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(
        2, (-1, FP8_BLOCK)
    )  # [rows / 128, 128, cols / 128, 128]
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_(min=_TINY)
    weight.scale.copy_(scale)
    codes = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).flatten(2).flatten(0, 1)
    weight.weight.copy_(codes[:outputs, :inputs])


def search_groups(
    values: torch.Tensor,
    scale_dtype: torch.dtype,
    importance: torch.Tensor | None = None,
    fractions: tuple[float, ...] = _FRACTIONS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scales, zero points and 4-bit codes of groups that minimise the weighted squared error.

    Each fraction of a group's range is tried; what lies outside saturates.

    Args:
        values: fp32 [outputs, groups, group size].
        scale_dtype: dtype of the scales.
        importance: weight of each input's error, [groups, group size]; None: all 1.
        fractions: of the range.

    Returns:
        Scales and zero points [outputs, groups], and codes uint8 [outputs, groups, group size].
    """
    high, low = values.amax(-1).clamp_(min=0), values.amin(-1).clamp_(max=0)
    best = None
    for fraction in fractions:
        scale = ((high - low) * (fraction / 15)).clamp_(min=_TINY if scale_dtype != torch.float16 else 6e-8)
        scale = scale.to(scale_dtype)
        step = scale.float()
        zero = (-low * fraction / step).round_().clamp_(0, 15)
        codes = (values / step.unsqueeze(-1)).add_(zero.unsqueeze(-1)).round_().clamp_(0, 15)
        error = (codes - zero.unsqueeze(-1)).mul_(step.unsqueeze(-1)).sub_(values).square_()
        loss = (error if importance is None else error * importance).sum(-1)
        if best is None:
            best = (loss, scale, zero, codes)
            continue
        better = loss < best[0]
        best = (
            torch.where(better, loss, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, zero, best[2]),
            torch.where(better.unsqueeze(-1), codes, best[3]),
        )
    assert best is not None
    _, scale, zero, codes = best
    return scale, zero.to(torch.uint8), codes.to(torch.uint8)
