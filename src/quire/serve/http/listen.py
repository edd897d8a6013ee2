"""Checks of the port and the TLS files before the model is loaded, so that errors come early."""

from __future__ import annotations

import errno
import socket
import ssl

from quire.serve.settings import ServeConfig
from quire.types import ConfigError

_BACKLOG = 2048  # the same as uvicorn's, which calls listen() again


def bind(settings: ServeConfig) -> socket.socket:
    """Return a socket bound to the configured address that does not listen yet. Raise ConfigError if that fails."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise _cannot_listen(settings, error) from None
    return sock


def listen(sock: socket.socket, settings: ServeConfig) -> None:
    """Start to accept connections on `sock`.

    Raises:
        ConfigError: if another process listens already. Several may bind a port while none listens.
    """
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(settings, error) from None


def _cannot_listen(settings: ServeConfig, error: OSError) -> ConfigError:
    flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
    return ConfigError(
        f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}); choose another {flag}"
    )


def check_tls(settings: ServeConfig) -> None:
    """Raise ConfigError if the TLS certificate and key cannot be loaded or do not match."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"TLS with ssl_certfile {settings.ssl_certfile} and ssl_keyfile {settings.ssl_keyfile} fails: "
            f"{error.strerror or error}"
        ) from None
