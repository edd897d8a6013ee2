"""Reader of the header of a GGUF file: keys and values, and where the tensors are. It needs neither numpy nor torch.

Every length in the file is checked against the file's size and against a limit before it is used.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.files.reading import check_regular, shown
from quire.types import ModelError

# GGUF value types by number: struct codes of the scalars; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4
MAX_TOKENS = 1 << 19  # of a vocabulary; the largest published one has half as many
_MAX_VALUES = 4 * MAX_TOKENS  # in all arrays together: tokens, types, scores, merges
_MAX_TENSORS = 200_000
_MAX_KEYS = 10_000
_TENSOR_BYTES = 24  # minimal size of a tensor's entry in the header
_MAX_STRING_BYTES = 1 << 28  # of all strings together
_MAX_DIMENSIONS = 4
_MAX_DIMENSION = 1 << 40
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """A tensor of a file: name, dimensions (inputs first), number of its format, and offset behind `data_start`."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The keys and values of a file, its tensors, and the byte behind the header where their numbers begin."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensorInfo, ...]
    data_start: int


class _Cursor:
    """A position in the file, with methods that read values there. Reading past the end raises ModelError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0
        self._values = 0  # in arrays so far
        self._string_bytes = 0  # so far

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ModelError(
                f"{self._path} is truncated or corrupt: its header runs past the end of the file"
            )
        self._at += size
        return self._data[self._at - size : self._at]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize("<" + code)
        return struct.unpack(f"<{count}{code}", self.take(size * count))

    def length(self) -> int:
        return self.numbers("Q", 1)[0]

    def string(self) -> str:
        length = self.length()
        self._string_bytes += length
        if self._string_bytes > _MAX_STRING_BYTES and length <= len(self._data) - self._at:
            raise ModelError(
                f"{self._path} has more than {_MAX_STRING_BYTES} bytes of strings in its header, which is the limit"
            )
        return self.take(length).decode("utf-8", "replace")

    def tensor(self) -> GGUFTensorInfo:
        """Read the entry of one tensor."""
        name = self.string()
        (dimensions,) = self.numbers("I", 1)
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            raise ModelError(
                f"{self._path} is corrupt: tensor {shown(name)} has {dimensions} dimensions instead of 1 to "
                f"{_MAX_DIMENSIONS}"
            )
        shape = self.numbers("Q", dimensions)
        if not all(0 < size <= _MAX_DIMENSION for size in shape):
            raise ModelError(
                f"{self._path} is corrupt: tensor {shown(name)} has the dimensions {list(shape)}"
            )
        (kind,) = self.numbers("I", 1)
        return GGUFTensorInfo(name, shape, kind, self.length())

    def aligned(self, alignment: Any) -> int:
        """Return the position, rounded up to a multiple of `alignment`, which must be a power of two."""
        if (
            not isinstance(alignment, int)
            or not 0 < alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise ModelError(
                f"{self._path}: general.alignment must be a power of two up to {_MAX_ALIGNMENT}, got "
                f"{shown(alignment)}"
            )
        return -(-self._at // alignment) * alignment

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], 1)[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise ModelError(f"{self._path} is corrupt: value type {kind} does not exist in GGUF")
        (inner,) = self.numbers("I", 1)
        count = self._array_length()
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        return [self.value(inner, depth + 1) for _ in range(count)]

    def count(self, noun: str, limit: int, item_bytes: int) -> int:
        """Read a number of items, and check it before anything loops over it.

        Args:
            noun: name of the items, for messages.
            limit: the largest number accepted.
            item_bytes: minimal size of an item in the file.
        """
        count = self.length()
        if count * item_bytes > len(self._data) - self._at:
            raise ModelError(f"{self._path} is truncated or corrupt: {count} {noun} do not fit into it")
        if count > limit:
            raise ModelError(f"{self._path} has {count} {noun}, but the limit is {limit}")
        return count

    def _array_length(self) -> int:
        count = self.count("values in an array", 2 * MAX_TOKENS, 1)
        self._values += count
        if self._values > _MAX_VALUES:
            raise ModelError(
                f"{self._path} has more than {_MAX_VALUES} values in the arrays of its header, which is the limit"
            )
        return count


def _check_vocabulary(metadata: dict[str, Any], path: Path) -> None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > MAX_TOKENS:
        raise ModelError(f"{path} has a vocabulary of {len(tokens)} tokens, but the limit is {MAX_TOKENS}")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all keys and values of the header, with arrays as lists.

    Raises:
        ModelError: see `read_gguf_header`.
    """
    return read_gguf_header(path).metadata


def read_gguf_header(path: Path, first_only: bool = True) -> GGUFHeader:
    """Return the header, with arrays as lists.

    Args:
        path: the file.
        first_only: whether to refuse a later part of a split file, which lacks most keys.

    Raises:
        ModelError: if the file is missing, is not GGUF, is damaged, or exceeds a limit.
    """
    check_regular(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            if cursor.take(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it does not begin with the bytes GGUF")
            (version,) = cursor.numbers("I", 1)
            if version not in (2, 3):
                raise ModelError(
                    f"{path} has GGUF version {version}, but Quire reads little-endian versions 2 and 3 only"
                )
            tensors = cursor.count("tensors", _MAX_TENSORS, _TENSOR_BYTES)
            metadata: dict[str, Any] = {}
            for _ in range(cursor.count("keys", _MAX_KEYS, 12)):
                key = cursor.string()
                metadata[key] = cursor.value(cursor.numbers("I", 1)[0])
            _check_vocabulary(metadata, path)
            number = metadata.get("split.no", 0)
            if first_only and number:
                count = metadata.get("split.count", 0)
                raise ModelError(
                    f"{path} is a later part of a split GGUF file (split.no {shown(number)} of {shown(count)}); name "
                    "its first part, whose name has -00001-of-"
                )
            infos = tuple(cursor.tensor() for _ in range(tensors))
            return GGUFHeader(metadata, infos, cursor.aligned(metadata.get("general.alignment", 32)))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
