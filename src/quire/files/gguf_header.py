"""Reader of the key-value header of a GGUF file. It needs neither numpy nor torch, and reads no tensors.

Every length in the file is checked against the file's size and against a limit before it is used.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from quire.files.reading import check_regular
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


class _Cursor:
    """A position in the file, with methods that read values there. Reading past the end raises ModelError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0
        self._values = 0  # in arrays so far

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
        return self.take(self.length()).decode("utf-8", "replace")

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
            cursor.count("tensors", _MAX_TENSORS, _TENSOR_BYTES)
            metadata: dict[str, Any] = {}
            for _ in range(cursor.count("keys", _MAX_KEYS, 12)):
                key = cursor.string()
                metadata[key] = cursor.value(cursor.numbers("I", 1)[0])
            _check_vocabulary(metadata, path)
            return metadata
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
