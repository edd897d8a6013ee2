"""A secret in a file, which all engines that use a folder share."""

from __future__ import annotations

import os
from pathlib import Path

from quire.types import ConfigError

_BYTES = 32


def folder_secret(folder: Path) -> bytes:
    """Return the secret of a folder, which is created with its secret if necessary.

    Raises:
        ConfigError: if the folder cannot be used, or its secret is not a file of the right size that only the owner can
            read.
    """
    path = folder / "secret"
    no_links = getattr(os, "O_NOFOLLOW", 0)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path, os.urandom(_BYTES))
        with open(os.open(path, os.O_RDONLY | no_links), "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"kv_disk {folder} cannot be used: {error.strerror or error}") from error
    if len(secret) != _BYTES or mode & 0o077:
        raise ConfigError(
            f"{path} must hold {_BYTES} bytes that only its owner can read; delete it, and with it what the folder keeps"
        )
    return secret


def _create(path: Path, secret: bytes) -> None:
    """Write a secret, unless another process does so first."""
    part = path.with_name(f"secret.{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    try:
        os.link(part, path)  # fails if the name is taken; a rename would replace it
    except FileExistsError:
        pass
    finally:
        part.unlink()
