"""Reads the key-value header of a GGUF file, and nothing after it: no tensors, no numpy, no torch.

Every length in the file is checked against the file's size before it is believed.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from quire.types import ModelError

# GGUF value types by number: struct codes of the scalars; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4


class _Cursor:
    """A position in the file. Raises ModelError rather than read past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ModelError(
                f"{self._path} is cut short or corrupt: its header runs past the end of the file"
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
        count = self.length()
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count)) if self._fits(count) else []
        return [self.value(inner, depth + 1) for _ in range(count)] if self._fits(count) else []

    def _fits(self, count: int) -> bool:
        """An array of `count` items needs at least that many bytes: refuse before looping over it."""
        if count > len(self._data) - self._at:
            raise ModelError(
                f"{self._path} is corrupt: an array of {count} values does not fit into the file"
            )
        return count > 0


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values of the header; arrays as lists."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            if cursor.take(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
            (version,) = cursor.numbers("I", 1)
            if version not in (2, 3):
                raise ModelError(
                    f"{path} has GGUF version {version}; Quire reads little-endian versions 2 and 3"
                )
            cursor.length()  # number of tensors
            found: dict[str, Any] = {}
            for _ in range(cursor.length()):
                key = cursor.string()
                found[key] = cursor.value(cursor.numbers("I", 1)[0])
            return found
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
