"""`open_gguf`: the metadata and the memory-mapped tensors of a GGUF file, or of all parts of a split one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from quire.files.gguf_header import GGUFHeader, GGUFTensorInfo, read_gguf_header
from quire.types import ModelError

_GGMLType = gguf.GGMLQuantizationType
_NUMPY = {
    _GGMLType.F32: np.float32, _GGMLType.F16: np.float16, _GGMLType.F64: np.float64,
    _GGMLType.I8: np.int8, _GGMLType.I16: np.int16, _GGMLType.I32: np.int32, _GGMLType.I64: np.int64,
}  # fmt: skip
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: its name in the file.
        tensor_type: format of its numbers.
        shape: dimensions, inputs first.
        data: its numbers, outputs first; of a quantised format, the bytes of its rows.
    """

    name: str
    tensor_type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def n_elements(self) -> int:
        """Return the number of numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The metadata of a file by key, and its tensors."""

    metadata: dict[str, Any]
    tensors: Sequence[GGUFTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file, memory-mapped. The first part of a split file stands for all parts.

    Raises:
        ModelError: if a file is missing or damaged.
    """
    header = read_gguf_header(path)
    tensors = _map(path, header)
    for part in _other_parts(path, header.metadata.get("split.count", 1)):
        tensors += _map(part, read_gguf_header(part, first_only=False))
    names = Counter(tensor.name for tensor in tensors)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ModelError(f"{path} is corrupt: it has the tensor {twice[0]!r} more than once")
    expected = header.metadata.get("split.tensors.count", len(names))
    if header.metadata.get("split.count", 1) not in (0, 1) and expected != len(names):
        raise ModelError(f"the parts of {path} hold {len(names)} tensors, but there should be {expected}")
    return GGUFFile(header.metadata, tensors)


def _other_parts(path: Path, count: Any) -> list[Path]:
    """Return the further parts of a split file of `count` parts; there are none if it is not split.

    Raises:
        ModelError: if a part is missing, or the name of the file does not tell the names of the others.
    """
    if count in (0, 1):
        return []
    match = _PART.fullmatch(path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != count or count > _MAX_PARTS:
        raise ModelError(
            f"{path} is the first of {count} parts of a split GGUF file, so its name must end in "
            f"-00001-of-{count:05}.gguf"
        )
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelError(f"{path} is a split GGUF file whose part {missing[0]} is missing")
    return parts


def _map(path: Path, header: GGUFHeader) -> list[GGUFTensor]:
    """Return the tensors of one file, mapped into memory."""
    if not header.tensors:
        return []
    try:
        mapped = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
    return [_tensor(path, mapped, header.data_start, info) for info in header.tensors]


def _tensor(path: Path, mapped: np.ndarray, start: int, info: GGUFTensorInfo) -> GGUFTensor:
    """Return one tensor.

    Raises:
        ModelError: if its format is unknown, or the file ends before it does.
    """
    try:
        kind = _GGMLType(info.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path}: tensor {info.name!r} has type {info.kind}, which is not known to this version of Quire"
        ) from None
    if info.shape[0] % block:
        raise ModelError(
            f"{path} is corrupt: rows of tensor {info.name!r} have {info.shape[0]} numbers, which is no multiple of "
            f"the {block} of a {kind.name} block"
        )
    row = info.shape[0] // block * block_bytes
    first, size = start + info.offset, row * math.prod(info.shape[1:])
    if first + size > len(mapped):
        raise ModelError(
            f"{path} is truncated or corrupt: tensor {info.name!r} ends at byte {first + size} of {len(mapped)}"
        )
    data = mapped[first : first + size]
    outer = tuple(reversed(info.shape[1:]))
    if kind in _NUMPY:
        return GGUFTensor(info.name, kind, info.shape, data.view(_NUMPY[kind]).reshape(*outer, info.shape[0]))
    return GGUFTensor(info.name, kind, info.shape, data.reshape(*outer, row))
