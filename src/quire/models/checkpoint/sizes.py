"""`weight_bytes`: the memory that a model's weights will take, from the headers of its files alone."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.models.spec import ModelSpec
from quire.quant.products import stays_packed
from quire.quant.spec import Conversion

_BITS: dict[Conversion, float] = {"fp8": 8, "fp8-block": 8, "int8": 8, "int4": 4}
_GROUP_BITS = 24  # a float16 scale and a byte of zero point
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def weight_bytes(
    path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, has_kernels: bool = True
) -> int:
    """Return the bytes of all weights in the form in which they are computed with.

    Args:
        path: folder or file of the model; it is opened only if its weights are quantised.
        spec: the model's spec, with the conversion that was asked for.
        dtype: of plain weights.
        device: where the model runs.
        has_kernels: whether the C kernels are used on a CPU.

    Raises:
        ModelError: if the weights cannot be opened.
    """
    quantization = spec.quantization
    if quantization is None or quantization.unsupported:
        return spec.num_parameters * dtype.itemsize
    if not stays_packed(device, has_kernels, quantization.is_fp8):
        return spec.num_parameters * dtype.itemsize
    if quantization.convert:
        return _converted_bytes(spec, quantization.convert, quantization.group_size, dtype)
    if path.suffix == ".gguf":
        return _gguf_bytes(path, dtype)
    return _stored_bytes(path, dtype)


def layer_bytes(
    parameters: int, spec: ModelSpec, dtype: torch.dtype, device: torch.device, has_kernels: bool = True
) -> int:
    """Return the bytes of `parameters` numbers in matrices of layers. The other arguments are those of `weight_bytes`.

    Weights that are stored in a quantised format count as plain ones.
    """
    quantization = spec.quantization
    if quantization is None or not stays_packed(device, has_kernels, quantization.is_fp8):
        return parameters * dtype.itemsize
    bits = (
        _bits(quantization.convert, quantization.group_size) if quantization.convert else 8 * dtype.itemsize
    )
    return int(parameters * bits / 8)


def _bits(convert: Conversion, group_size: int) -> float:
    """Return the bits of a converted number."""
    return _BITS[convert] + (_GROUP_BITS / group_size if convert == "int4" else 0)


def _converted_bytes(spec: ModelSpec, convert: Conversion, group_size: int, dtype: torch.dtype) -> int:
    table = spec.vocab_size * spec.hidden_size
    bits = _bits(convert, group_size)
    head = table if convert in ("int8", "int4") else 0  # kept in 8 bits beside the table of a tied model
    tables = table * dtype.itemsize * (1 if spec.tie_embeddings or head else 2)
    body = spec.num_parameters - table * (1 if spec.tie_embeddings else 2)
    return int(body * bits / 8) + tables + head


def _stored_bytes(path: Path, dtype: torch.dtype) -> int:
    """Return the bytes of packed tensors as they are stored, and of the others in `dtype`."""
    checkpoint = SafetensorsCheckpoint(path, tied=False)
    try:
        stored = [found for name in checkpoint.where if (found := checkpoint.stored(name))]
    finally:
        checkpoint.close()
    return sum(
        math.prod(found.shape) * (dtype if found.dtype in _FLOATS else found.dtype).itemsize
        for found in stored
    )


def _gguf_bytes(path: Path, dtype: torch.dtype) -> int:
    from quire.models.config.gguf_file import open_gguf  # deferred: most runs need no GGUF reader
    from quire.quant.formats.gguf import KINDS

    total = 0.0
    for tensor in open_gguf(path).tensors:
        kind = KINDS.get(tensor.tensor_type.name)
        is_table = tensor.name.startswith("token_embd")
        total += int(tensor.n_elements) * (dtype.itemsize if kind is None or is_table else kind.bits / 8)
    return int(total)
