"""Flags that name files and folders to write: a path is refused before the work whose result it is to hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from quire.types import ConfigError


def output_file(text: str) -> Path:
    """Parse the path of a file to write, whose folders may be missing.

    Nothing is created. The disk may still be full when the file is written.

    Raises:
        ConfigError: if the path is empty or a folder, or the system would not let this user write it.
    """
    path = Path(text)
    if os.path.isdir(path):  # an empty text is the current folder
        raise _refusal(text, errno.EISDIR)
    if not os.path.exists(path):
        _check_folder(path.parent, text)
    elif not os.access(path, os.W_OK):
        raise _refusal(text, errno.EACCES)
    return path


def output_folder(text: str) -> Path:
    """Parse the path of a folder to write into, which may be missing.

    Raises:
        ConfigError: if it is a file, or the system would not let this user create it or write into it.
    """
    path = Path(text)
    _check_folder(path, text)
    return path


def _check_folder(folder: Path, text: str) -> None:
    """Raise ConfigError, which names `text`, unless `folder` can be written into or created."""
    nearest = next(p for p in (folder, *folder.parents, Path()) if os.path.lexists(p))
    if not os.path.isdir(nearest):
        raise _refusal(text, errno.ENOTDIR)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _refusal(text, errno.EACCES)


def _refusal(text: str, code: int) -> ConfigError:
    return ConfigError(f"cannot write {text or repr(text)}: {os.strerror(code)}")
