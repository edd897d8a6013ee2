"""Files of quantised weights: from a plain matrix to the tensors of compressed-tensors, or of FP8 blocks.

The tensors are those that transformers and vLLM load, so scales are first rounded to the dtype in which they are
stored, and numbers are rounded with the stored scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.quant.formats.convert import quantise_into
from quire.quant.forms import pack4
from quire.quant.layouts import Fp8Layout
from quire.quant.rounding import INT8_MAX
from quire.quant.spec import Conversion

# Ranges that the search of int4 tries, as fractions of the full one.
_FRACTIONS = tuple(1 - i / 40 for i in range(20))
_TINY = 1e-12
# A module's tensors by the end of their names, from its weight [outputs, inputs] and the size of a group.
Exporter = Callable[[torch.Tensor, int], dict[str, torch.Tensor]]


def export_weight(weight: torch.Tensor, form: Conversion, group_size: int) -> dict[str, torch.Tensor]:
    """Return the tensors that store `weight` [outputs, inputs], by the end of their names."""
    return _EXPORTERS[form](weight, group_size)


def describe(form: Conversion, group_size: int, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint.

    Args:
        form: the format.
        group_size: columns with a common scale, for int4.
        ignored: names of linear layers that stay plain.
    """
    if form == "fp8-block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(ignored),
        }
    kind, bits = ("float", 8) if form == "fp8" else ("int", 4 if form == "int4" else 8)
    weights = {
        "num_bits": bits, "type": kind, "strategy": "group" if form == "int4" else "channel",
        "symmetric": True, "group_size": group_size if form == "int4" else None, "dynamic": False,
        "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    inputs = {
        "num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True, "group_size": None,
        "actorder": None, "block_structure": None, "observer": None, "observer_kwargs": {},
    }  # fmt: skip
    name = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}[form]
    group = {
        "format": name,
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if form == "int4" else inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _fp8(weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    scale = _row_scale(weight, 448.0)
    codes = (weight.float() / scale.float()).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}


def _fp8_block(weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    rows, cols = weight.shape
    form = Fp8Layout(by_block=True, rounding="block").allocate((), rows, cols, weight.device)
    quantise_into(form, weight)
    return {"weight": form.weight, "weight_scale_inv": form.scale}


def _int8(weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    scale = _row_scale(weight, INT8_MAX)
    codes = (weight.float() / scale.float()).round_().clamp_(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def _row_scale(weight: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the scale of each row in bfloat16, [outputs, 1]."""
    return (weight.float().abs().amax(-1, keepdim=True) / largest).clamp_(min=_TINY).to(torch.bfloat16)


def _int4(weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    scale, codes = search_symmetric(weight.float().unflatten(-1, (-1, group_size)))
    return int4_tensors(scale, codes.flatten(-2))


def int4_tensors(scale: torch.Tensor, codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight in 4 bits by the end of their names.

    Args:
        scale: bfloat16 [outputs, groups].
        codes: uint8 [outputs, inputs], 8 for zero.
    """
    return {
        "weight_packed": pack4(codes).view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }


def search_symmetric(
    groups: torch.Tensor, importance: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and 4-bit codes without zero points that minimise the squared error of each group.

    The number of largest magnitude gets the code -8, which has no counterpart, so a scale may be negative.

    Args:
        groups: fp32 [outputs, groups, group size].
        importance: weight of each input's error, [groups, group size].

    Returns:
        Scales, bfloat16 [outputs, groups], and codes plus 8, uint8 [outputs, groups, group size].
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    largest = torch.where(largest == 0, 8 * _TINY, largest)
    scale, codes = torch.zeros_like(largest), torch.zeros_like(groups)
    least = torch.full_like(largest, torch.inf)
    for fraction in _FRACTIONS:
        step = (largest * (fraction / -8)).to(torch.bfloat16).float()
        rounded = (groups / step.unsqueeze(-1)).round_().clamp_(-8, 7)
        loss = (rounded * step.unsqueeze(-1)).sub_(groups).square_().mul_(importance).sum(-1)
        better = loss < least
        least, scale = torch.where(better, loss, least), torch.where(better, step, scale)
        codes = torch.where(better.unsqueeze(-1), rounded, codes)
    return scale.to(torch.bfloat16), (codes + 8).to(torch.uint8)


_EXPORTERS: dict[Conversion, Exporter] = {"fp8": _fp8, "fp8-block": _fp8_block, "int8": _int8, "int4": _int4}
