"""Lines for whoever started the server. A disk that is full, or a reader that is gone, must not stop it."""

from __future__ import annotations

import contextlib
import os

STDOUT, STDERR = 1, 2


def say(text: str, to: int = STDOUT) -> None:
    """Write a line past Python's buffers: what cannot be written is not tried again at exit."""
    with contextlib.suppress(OSError):
        os.write(to, f"{text}\n".encode())
