"""`GGUFCheckpoint`: weights of a GGUF file under their Hugging Face names.

Blocks of the kinds in quant/formats/gguf.py are handed out as they are; all others are dequantised while reading.

llama.cpp's converter renames tensors (gguf_names.py), reorders rows and changes values (gguf_changes.py), transposes
GPT-2's matrices, and stacks experts. This module undoes all of that, so a model does not depend on the format of its
checkpoint.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from quire.layers.env import StoredShape
from quire.models.checkpoint.checkpoint import Checkpoint, check_shape, check_unread
from quire.models.checkpoint.gguf_changes import Change, Order, change_of
from quire.models.checkpoint.gguf_names import IN_SPEC, GGUFNames, GGUFPlace
from quire.models.config.gguf import Metadata
from quire.models.config.gguf_file import GGUFTensor, open_gguf
from quire.models.config.gguf_recent import XIELU
from quire.models.config.gguf_source import GGUFSource
from quire.models.spec import ModelSpec
from quire.quant.formats.gguf import KINDS
from quire.types import ModelError

log = logging.getLogger("quire")

_PLAIN = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)
_WHOLE = slice(None)
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class GGUFCheckpoint(Checkpoint):
    """Weights of one .gguf file. Tensors whose names match `elsewhere` need not be loaded."""

    def __init__(self, path: Path, spec: ModelSpec, elsewhere: re.Pattern[str] | None = None) -> None:
        file = open_gguf(path)
        self.path = path
        self.spec = spec
        meta = Metadata(file, path)
        self.arch = meta.arch
        self.tensors = {tensor.name: tensor for tensor in [*file.tensors, *_xielu(meta, spec)]}
        self.names = GGUFNames(self.arch, self.tensors)
        self.unpacked: Counter[str] = Counter()  # tensors read, by a type that is not computed with as it is
        unused = _unused(spec)
        self.unread = {
            name
            for name in set(self.tensors) - IN_SPEC
            if not (elsewhere and elsewhere.search(name)) and not unused.match(name)
        }

    def has(self, name: str) -> bool:
        return self.names.find(name).name in self.tensors

    def stored(self, name: str) -> StoredShape | None:
        place = self.names.find(name)
        if place.name not in self.tensors:
            return None
        source = self.tensors[place.name]
        kind = KINDS.get(source.tensor_type.name)
        change = self._change(name, place)
        if kind is None or (change.cols and change.cols.blocks(kind.numbers) is None):
            return None
        shape = _matrix(source, place).shape
        rows = shape[0] if change.rows is None else len(change.rows.index)
        return StoredShape(torch.uint8, (rows, *shape[1:]), source.tensor_type.name)

    def packed(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        """Return blocks of a tensor as bytes [rows, bytes of a row], or a plain tensor as `tensor` does."""
        if self.stored(name) is None:
            return self.tensor(name, shape, rows, cols)
        place = self.names.find(name)
        source, change = self.tensors[place.name], self._change(name, place)
        data = _matrix(source, place)
        check_shape(name, _in_file(shape, change), tuple(data.shape))
        self.unread.discard(place.name)
        blocks = data[_chosen(change.rows, rows)]
        if change.cols:
            kind = KINDS[source.tensor_type.name]
            order = change.cols.blocks(kind.numbers)
            blocks = blocks.reshape(len(blocks), -1, kind.bytes)[:, order].reshape(blocks.shape)
        return torch.from_numpy(np.require(blocks[:, cols], requirements=["C", "W"]))

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        place = self.names.find(name)
        if name.endswith("kv_b_proj.weight") and place.name not in self.tensors:
            return self._joined(name, shape)[rows, cols].contiguous()
        if place.name not in self.tensors:
            raise ModelError(
                f"{self.path} has no tensor {place.name or 'for'} ({name}, expected shape {list(shape)})"
            )
        source, change = self.tensors[place.name], self._change(name, place)
        transposed = self.arch == "gpt2" and name.endswith(_TRANSPOSED)
        inside = _in_file(shape, change)[:: -1 if transposed else 1]
        self._check(name, inside, source, place)
        self.unread.discard(place.name)
        if source.tensor_type not in _PLAIN and self.stored(name) is None:
            self.unpacked[source.tensor_type.name] += 1
        data = _matrix(source, place)
        early = data.ndim == len(shape) == 2 and not transposed  # rows are chosen before they are dequantised
        values = self._unpack(place.name, data[_chosen(change.rows, rows)] if early else data, source)
        if not early:
            values = values.reshape(inside)
            if shape:  # a single number has no rows
                values = (values.T if transposed else values)[_chosen(change.rows, _WHOLE)][rows]
        if change.cols:
            values = values[:, change.cols.index]
        values = change.values(values) if change.values else values
        chosen = values[:, cols] if values.ndim > 1 else values
        return torch.from_numpy(np.require(chosen, requirements=["C", "W"]))

    def _change(self, name: str, place: GGUFPlace) -> Change:
        if place.half is None:
            return change_of(self.arch, name, self.spec)
        total = _matrix(self.tensors[place.name], place).shape[0]
        return Change(Order(np.arange(total).reshape(2, -1)[place.half], total))

    def _check(self, name: str, expected: tuple[int, ...], source: GGUFTensor, place: GGUFPlace) -> None:
        """Raise ModelError if the stored tensor has another shape; dimensions of 1 do not count."""
        stored = tuple(int(n) for n in reversed(source.shape))
        stored = stored[1:] if place.index is not None else stored
        if place.name.endswith("ssm_norm.weight"):  # stored by group
            stored = (math.prod(stored),)
        if [n for n in stored if n != 1] != [n for n in expected if n != 1]:
            check_shape(name, expected, stored)

    def _joined(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return `kv_b_proj`, which newer files store as two stacks of one matrix per head."""
        heads, rank = self.spec.num_heads, shape[1]
        latent = self.spec.latent
        assert latent is not None
        keys = self.tensor(name.replace("kv_b_", "k_b_"), (heads, rank, latent.content_dim))
        values = self.tensor(name.replace("kv_b_", "v_b_"), (heads, latent.value_dim, rank))
        joined = torch.cat((keys.float().transpose(1, 2), values.float()), 1).flatten(0, 1)
        check_shape(name, shape, tuple(joined.shape))
        return joined

    def close(self) -> None:
        self.tensors = {}

    def finish(self) -> None:
        self.close()
        if self.unpacked:
            counts = ", ".join(f"{count} of type {name}" for name, count in sorted(self.unpacked.items()))
            log.info("tensors that are unpacked into the model's dtype: %s", counts)
        check_unread(
            {"lm_head.weight" if name == "output.weight" else name for name in self.unread},
            self.spec.tie_embeddings,
        )

    def _unpack(self, name: str, data: np.ndarray, source: GGUFTensor) -> np.ndarray:
        kind = source.tensor_type
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            return data
        try:
            with np.errstate(
                invalid="ignore", over="ignore"
            ):  # numbers that are not finite are reported later
                return gguf.quants.dequantize(data, kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{self.path}: tensor {name} has the format {kind.name}, which cannot be read ({error})"
            ) from error


def _xielu(meta: Metadata, spec: ModelSpec) -> list[GGUFTensor]:
    """Return the numbers of xIELU, which are metadata, as a tensor of one number for each layer and name."""
    if spec.activation != "xielu":
        return []
    source = GGUFSource(meta.arch, meta, {}, {}, spec.num_layers)
    return [
        GGUFTensor(
            f"blk.{layer}.xielu.{name}", gguf.GGMLQuantizationType.F32, (1,), np.array([value], np.float32)
        )
        for name in XIELU
        for layer, value in enumerate(source.by_layer(f"xielu.{name}"))
    ]


def _unused(spec: ModelSpec) -> re.Pattern[str]:
    """Return a pattern of the names of tensors that Quire does not load.

    These are layers that predict several tokens ahead, behind the last one, and the keys and values of layers that
    read those of another layer.
    """
    patterns = [rf"{spec.num_layers + number}\." for number in range(spec.extra_layers)]
    readers = [index for index in range(spec.num_layers) if spec.kv_source(index) != index]
    patterns += [rf"{index}\.attn_(k|v|k_norm)\." for index in readers]
    return re.compile(rf"blk\.({'|'.join(patterns) or '(?!)'})")


def _matrix(source: GGUFTensor, place: GGUFPlace) -> np.ndarray:
    """Return the stored numbers or blocks of a tensor, or of one matrix of a stack."""
    data: np.ndarray = source.data
    if place.index is not None:
        if data.ndim < 2 or place.index >= len(data):
            stored = [int(n) for n in reversed(source.shape)]
            raise ModelError(
                f"tensor {place.name} has shape {stored}, but the model needs matrix {place.index} of it"
            )
        data = data[place.index]
    if place.half is not None and len(data) % 2:
        raise ModelError(f"tensor {place.name} has {len(data)} rows, but it must hold two equal halves")
    return data


def _in_file(shape: tuple[int, ...], change: Change) -> tuple[int, ...]:
    """Return the shape in the file of a tensor that has `shape` in the checkpoint."""
    return shape if change.rows is None else (change.rows.total, *shape[1:])


def _chosen(order: Order | None, rows: slice) -> Any:
    """Return the index of `rows` in the file."""
    return rows if order is None else order.index[rows]
