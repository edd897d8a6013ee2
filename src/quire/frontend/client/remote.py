"""Connections between processes of different hosts: TCP sockets whose first message is a token that both sides know.

The messages that follow are those of `channel.py`. They are neither encrypted nor signed: use a private network.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import subprocess
import time

import msgspec

from quire.types import ConfigError

_HELLO_S = 5.0  # limit on the first message of a connection
_RETRY_S = 0.2  # between two attempts to connect
_DEAD_HOST_MS = 15_000  # after which a host that sends no acknowledgements counts as gone
_ATTEMPT_S = 5.0
_WATCH_S = 0.05


class Hello(msgspec.Struct):
    """The first message of a connection: the token, and who connects."""

    token: str
    host: str
    pid: int
    device: str = "auto"


_decode_hello = msgspec.msgpack.Decoder(Hello).decode


def split_address(address: str, name: str = "rank_address") -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    Raises:
        ConfigError: if `address`, the value of the setting `name`, has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name} must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def new_token() -> str:
    """Return a token for connections."""
    return secrets.token_hex(16)


def meeting_host(address: str | None) -> str:
    """Return the host at which ranks meet: that of the first rank, or the loopback interface on one host."""
    return "127.0.0.1" if address is None else split_address(address)[0]


def own_address(towards: str) -> str:
    """Return the address of this host on the network that leads to the host `towards`."""
    family = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 1))  # sends nothing
        return str(probe.getsockname()[0])


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on the interface of `host`; port 0 picks a free one."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=128)


def connect(host: str, port: int, hello: Hello, timeout_s: float) -> socket.socket:
    """Connect and introduce this process, trying again until somebody listens.

    Raises:
        ConfigError: if nothing listens within `timeout_s`.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            end = socket.create_connection((host, port), timeout=_ATTEMPT_S)
            break
        except OSError as error:
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"nothing listens at {host}:{port} after {timeout_s:g} s: {error}"
                ) from None
            time.sleep(_RETRY_S)
    _set_up(end)
    channel_bytes = msgspec.msgpack.encode(hello)
    end.sendall(len(channel_bytes).to_bytes(4, "little") + channel_bytes)
    return end


def accept(server: socket.socket, token: str, timeout_s: float) -> tuple[socket.socket, Hello] | None:
    """Return the next connection whose token is right, or None if there is none within `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        server.settimeout(left_s)
        try:
            end, _ = server.accept()
        except TimeoutError:
            return None
        if (hello := _receive_hello(end)) is not None and hmac.compare_digest(hello.token, token):
            _set_up(end)
            return end, hello
        end.close()
    return None


def _receive_hello(end: socket.socket) -> Hello | None:
    """Return the first message of a connection, or None if it is something else."""
    end.settimeout(_HELLO_S)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        size = int.from_bytes(_read(end, 4), "little")
        if size <= 4096:
            return _decode_hello(_read(end, size))
    return None


def _read(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (piece := end.recv(size - len(found))):
            raise ConnectionError("the connection ended")
        found += piece
    return found


def _set_up(end: socket.socket) -> None:
    """Send small messages at once, and notice a host that is gone."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", _DEAD_HOST_MS)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class RemoteProcess:
    """A process of another host, as far as its connection tells, with the methods of `subprocess.Popen` used here."""

    def __init__(self, end: socket.socket, hello: Hello) -> None:
        self._end = end.dup()  # the channel closes its own
        self.pid, self.returncode = hello.pid, 0
        self.host = hello.host
        self._closed = False

    def poll(self) -> int | None:
        """Return None while the connection is open, then 1."""
        try:
            ended = self._closed or not self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if not ended:
                return None
        except BlockingIOError:
            return None
        except OSError:
            ended = True
        self.returncode = int(ended)
        return 1 if ended else None

    def kill(self) -> None:
        """Close the connection, which ends the process."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
            self._end.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the connection ends, and return 1. Raises subprocess.TimeoutExpired."""
        end_s = time.monotonic() + timeout if timeout is not None else None
        while self.poll() is None:
            if end_s is not None and time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("remote process", timeout or 0.0)
            time.sleep(_WATCH_S)
        return 1

    def exit_text(self) -> str:
        return "a closed connection"
