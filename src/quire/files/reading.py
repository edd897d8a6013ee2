"""Bounded reading of untrusted files. Every problem raises a ModelError that names the file."""

from __future__ import annotations

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from quire.types import ModelError

MAX_CONFIG_BYTES = 16 << 20  # of a JSON file that describes a model
MAX_VOCABULARY_BYTES = 128 << 20  # of a file with a vocabulary, or with the names of all tensors

_SHOWN_PATH = 300  # characters of a path in an error message
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """Return a short representation of a value for an error message, on one line."""
    return _short.repr(value)


def check_reachable(path: Path) -> None:
    """Raise ModelError if the system refuses to say whether `path` exists, as it does behind a folder without permission.

    `Path.exists` raises OSError then, or where a name is too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"{_cut(path)} cannot be read: {reason}") from None


def _cut(path: Path) -> str:
    """Return a path for an error message, without the middle of a very long one."""
    text = str(path)
    return text if len(text) <= _SHOWN_PATH else f"{text[:100]}...{text[-100:]}"


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Raise ModelError unless `path` is a regular file of at most `max_bytes`. A named pipe would block."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(f"{path} has {status.st_size} bytes, but the limit is {max_bytes}")


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most `max_bytes`, or raise ModelError."""
    check_regular(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})") from error


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES, optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of at most `max_bytes`, or raise ModelError.

    With `optional`, a missing file counts as an empty object.
    """
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(read_text(path, max_bytes))
    except RecursionError:
        raise ModelError(f"{path} cannot be read: its lists and objects are nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value
