"""The port, taken before anything else: one in use is known before a model is loaded."""

from __future__ import annotations

import socket

from quire.serve.settings import ServeConfig
from quire.types import ConfigError


def bind(settings: ServeConfig) -> socket.socket:
    """A socket that is bound but does not listen yet. Raises ConfigError when that cannot be."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}); choose another --port"
        ) from None
    return sock
