"""`ProcessClient`: an engine in a child process (engine_process.py), reached over a channel (channel.py)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref

from quire import types
from quire.config import EngineConfig
from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import Channel
from quire.types import ConfigError, EngineDead, EngineInfo, EngineOutputs, EngineRequest, QuireError

_STOP_S = 5.0  # time for an orderly exit, after which the process is killed


def start_engine_process(
    process_group: int | None = None, inherit: tuple[int, ...] = ()
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start an engine process.

    Args:
        process_group: process group to put it into; 0 makes a new group, None keeps this process's group.
        inherit: file descriptors that it inherits, under the same numbers.

    Returns:
        The process and this end of the channel to it. The process waits for a StartEngine message.

    Raises:
        ConfigError: on Windows, where a child process cannot inherit a socket.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "engine_process needs Linux or macOS; on Windows the engine runs in your own process"
        )
    parent_end, child_end = socket.socketpair()
    with child_end:
        command = [sys.executable, "-m", "quire.engine_process", str(child_end.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[child_end.fileno(), *inherit],
            process_group=process_group,
        )
    return process, Channel(parent_end)


class ProcessClient:
    """An EngineClient that owns an engine process and the channel to it.

    Building one starts the engine and waits until it is ready. With `wait=False` it returns at once, and `await_ready`
    waits. The process ends with `close`, when the client is garbage-collected, or with the interpreter.

    Raises:
        ConfigError: if the settings cannot work.
        ModelError: if the model cannot be loaded.
        EngineDead: if the process ended for another reason.
    """

    def __init__(self, config: EngineConfig, wait: bool = True) -> None:
        self.process, self._channel = start_engine_process()
        self._closing = weakref.finalize(self, _stop, self.process, self._channel)
        self._dead: str | None = None
        self._send(msg.StartEngine(config))
        if wait:
            self.await_ready()

    def add(self, request: EngineRequest) -> None:
        self._send(msg.Add(request))

    def abort(self, ids: list[str]) -> None:
        self._send(msg.Abort(ids))

    def poll(self, timeout_s: float) -> EngineOutputs:
        message = self._receive(timeout_s)
        return message.outputs if isinstance(message, msg.Outputs) else EngineOutputs([])

    def close(self) -> None:
        self._dead = self._dead or "it was closed"
        self._closing()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when a message arrives."""
        return self._channel.fileno()

    def await_ready(self) -> EngineInfo:
        """Wait until the engine is built, and return its description."""
        try:
            while not isinstance(message := self._receive(1.0), msg.EngineReady):
                pass
        except QuireError:
            self.close()
            raise
        except BaseException:  # such as Ctrl-C: the process reads no message until it is built
            self.process.kill()
            self.close()
            raise
        self.info: EngineInfo = message.info
        return self.info

    def _send(self, message: msg.ToEngine) -> None:
        if self._dead:
            raise EngineDead(f"the engine stopped: {self._dead}")
        self._channel.send(msg.encode(message))

    def _receive(self, timeout_s: float) -> msg.ToClient | None:
        """Return the next message, or None after `timeout_s`. Raise the error that ended the engine."""
        if self._dead:
            raise EngineDead(f"the engine stopped: {self._dead}")
        try:
            if not self._channel.poll(timeout_s):
                return None
        except EOFError:
            self._dead = f"its process ended with exit code {self.process.wait()}"
            raise EngineDead(f"the engine stopped: {self._dead}") from None
        message = msg.decode_to_client(self._channel.receive())
        if isinstance(message, msg.EngineFailed):
            self._dead = message.cause
            error = getattr(types, message.kind, None)
            if isinstance(error, type) and issubclass(error, QuireError):
                raise error(message.cause)
            raise EngineDead(f"the engine stopped: {message.cause}")
        return message


def _stop(process: subprocess.Popen[bytes], channel: Channel) -> None:
    """End an engine process in order, or kill it if it takes too long."""
    try:
        if process.poll() is None:
            channel.send(msg.encode(msg.StopEngine()))
            channel.settle(_STOP_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
    finally:  # also after Ctrl-C
        if process.poll() is None:
            process.kill()
            process.wait()
        channel.close()
