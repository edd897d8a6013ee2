"""The files of KV blocks on a disk.

A file is a header, the bytes of one block, and a keyed digest of both:

    magic 8 | fingerprint 16 | group 4 | name 16 | length 8 | bytes | blake2b 32

The fingerprint stands for everything that decides what the bytes of a name are: model, weights, dtype, layout, rank. A
file that is truncated, corrupt, a link or somebody else's fails its check, is deleted, and counts as missing. Files are
written under a temporary name and renamed, so a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from hashlib import blake2b
from pathlib import Path

import numpy as np

from quire.types import BlockKey, ConfigError

_MAGIC = b"QUIREKV1"
_HEADER = struct.Struct("<8s16sI16sQ")
_DIGEST_BYTES = 32
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class BlockFiles:
    """The files of one rank in a folder, which one engine at a time may use.

    Args:
        folder: the folder of the disk tier.
        fingerprint: 16 bytes.
        secret: the key of the digests, at most 64 bytes.
        block_bytes: bytes of a block.

    Raises:
        ConfigError: if the folder cannot be used, or another engine uses it.
    """

    def __init__(self, folder: Path, fingerprint: bytes, secret: bytes, block_bytes: int) -> None:
        self._fingerprint, self._secret, self._bytes = fingerprint, secret, block_bytes
        self._folder = folder / fingerprint.hex()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(self._folder / "lock")
        except OSError as error:
            raise ConfigError(f"kv_disk {folder} cannot be used: {error.strerror or error}") from error
        for left_over in self._folder.glob("*.part"):
            left_over.unlink(missing_ok=True)

    @property
    def file_bytes(self) -> int:
        """Bytes of a file."""
        return _HEADER.size + self._bytes + _DIGEST_BYTES

    def found(self) -> list[BlockKey]:
        """Return the keys of the existing files, the one written first first."""
        names = []
        for entry in os.scandir(self._folder):
            if (key := _key_of(entry.name)) and entry.is_file(follow_symlinks=False):
                names.append((entry.stat(follow_symlinks=False).st_mtime_ns, key))
        return [key for _, key in sorted(names)]

    def write(self, key: BlockKey, row: np.ndarray) -> bool:
        """Write the bytes of a block, uint8 [bytes]. Return False if the disk does not take them."""
        path = self._path(key)
        part = path.with_suffix(".part")
        header = self._header(key)
        digest = self._digest(header, row)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_LINKS
            with open(os.open(part, flags, 0o600), "wb", buffering=0) as file:
                for piece in (header, row.data, digest):
                    if file.write(piece) != len(piece):
                        raise OSError("the disk is full")
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return False
        return True

    def read(self, key: BlockKey, row: np.ndarray) -> bool:
        """Read the bytes of a block into `row`, uint8 [bytes]. Return False if the file does not hold them."""
        try:
            with open(os.open(self._path(key), os.O_RDONLY | _NO_LINKS), "rb", buffering=0) as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode) or about.st_size != self.file_bytes:
                    return False
                header = file.read(_HEADER.size)
                complete = file.readinto(row.data) == self._bytes
                digest = file.read(_DIGEST_BYTES)
        except OSError:
            return False
        return complete and header == self._header(key) and digest == self._digest(header, row)

    def drop(self, key: BlockKey) -> None:
        """Delete a file. A file that does not exist is ignored."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Let another engine use the folder."""
        os.close(self._lock)

    def _path(self, key: BlockKey) -> Path:
        group, name = key
        return self._folder / f"{group}-{name.hex()}.kv"

    def _header(self, key: BlockKey) -> bytes:
        return _HEADER.pack(_MAGIC, self._fingerprint, *key, self._bytes)

    def _digest(self, header: bytes, row: np.ndarray) -> bytes:
        digest = blake2b(header, digest_size=_DIGEST_BYTES, key=self._secret)
        digest.update(row.data)
        return digest.digest()


def _key_of(name: str) -> BlockKey | None:
    """Return the key that a file name stands for, or None."""
    stem, dot, suffix = name.partition(".")
    group, dash, digits = stem.partition("-")
    if not (dot and dash and suffix == "kv" and group.isdecimal() and len(group) < 6 and len(digits) == 32):
        return None
    with contextlib.suppress(ValueError):
        return int(group), bytes.fromhex(digits)
    return None


def _lock(path: Path) -> int:
    """Return the descriptor of a file that this process has locked. Raise OSError if another one has."""
    import fcntl  # not on Windows

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OSError("another engine with this model uses it; give each its own folder") from None
    return descriptor
