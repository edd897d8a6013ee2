"""The port and the TLS files, before anything else: what is wrong with them is known before a model is loaded."""

from __future__ import annotations

import errno
import socket
import ssl

from quire.serve.settings import ServeConfig
from quire.types import ConfigError

_BACKLOG = 2048  # as uvicorn, which asks for it again


def bind(settings: ServeConfig) -> socket.socket:
    """A socket that is bound but does not listen yet. Raises ConfigError when that cannot be."""
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
    """From now on clients can connect. Raises ConfigError if another process that had bound the same port, which
    is possible while nobody listens, was first."""
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
    """Raises ConfigError for a certificate and a key that cannot be used."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # ssl's own errors are OSErrors, too
        raise ConfigError(
            f"TLS with ssl_certfile {settings.ssl_certfile} and ssl_keyfile {settings.ssl_keyfile} fails: "
            f"{error.strerror or error}"
        ) from None
