"""What is tried before anything else, so that it is known before a model is loaded: the port, and files for TLS."""

from __future__ import annotations

import socket

from quire.serve.settings import ServeConfig
from quire.types import ConfigError


def check_tls(settings: ServeConfig) -> None:
    """Raise ConfigError for a key and a certificate that cannot be used."""
    if settings.ssl_certfile is None:
        return
    import ssl

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"ssl_certfile {settings.ssl_certfile} and ssl_keyfile {settings.ssl_keyfile} cannot be used together: "
            f"{error.strerror or error}"
        ) from None


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
