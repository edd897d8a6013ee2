"""Weights that compressed-tensors packs, against its own unpacking; it is not installed with the other test packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from whole import ONE_RANK, WholeSequenceAttention

pytest.importorskip("compressed_tensors", reason="compressed-tensors packs the reference weights")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from quire.layers.env import Env
from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.models.config.quantization import parse_quantization
from quire.quant.base import Part
from quire.quant.loading import load_stack

OUT, IN = 64, 256
FORMATS = {
    "W4A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized",
    "W8A16": "pack-quantized",
    "W8A8": "int-quantized",
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
}


def parameters(weight: torch.Tensor, scheme: Any) -> dict[str, torch.Tensor]:
    """Return the weight with the scales and zero points that an observer would choose."""
    args = scheme.weights
    size = args.group_size or (weight.shape[1] if args.strategy == "channel" else None)
    groups = weight.flatten()[None] if size is None else weight.unflatten(1, (-1, size))
    low, high = groups.amin(-1), groups.amax(-1)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale.flatten() if size is None else scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    return state


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_agree_with_the_library(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    scheme = preset_name_to_scheme(name, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(FORMATS[name])
    packed = compressor.compress(parameters(torch.randn(OUT, IN), scheme), scheme)
    wanted = compressor.decompress(dict(packed), scheme)["weight"].float()
    if name == "FP8":
        packed["input_scale"] = torch.tensor([0.1])
    save_file(
        {f"x.{key}": value.contiguous() for key, value in packed.items()}, tmp_path / "model.safetensors"
    )
    settings = {
        "quant_method": "compressed-tensors",
        "format": FORMATS[name],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    spec = parse_quantization(settings)
    assert spec is not None and spec.unsupported is None
    checkpoint = SafetensorsCheckpoint(tmp_path, False)
    env = Env(checkpoint, ONE_RANK, WholeSequenceAttention(), torch.device("cpu"), torch.float32)
    part = Part("x.weight", (OUT, IN), slice(None), slice(None))
    stack = load_stack(replace(env, quantization=spec), [[part]])
    assert not isinstance(stack, torch.Tensor)
    # The library unpacks NVFP4 in bfloat16.
    tolerance = 2**-8 if name == "NVFP4A16" else 1e-5
    torch.testing.assert_close(stack.expert(0).dequantised(), wanted, atol=1e-6, rtol=tolerance)
    checkpoint.finish()
