"""`ProcessClient`: the engine in a child process (engine_process.py), reached over ZeroMQ.

Owns the child, the socket and the folder in which the socket is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

import zmq

from quire import types
from quire.config import EngineConfig
from quire.frontend import messages as msg
from quire.types import EngineDead, EngineInfo, EngineOutput, EngineRequest, QuireError

_LOOK_MS = 200  # how often a waiting client looks whether the engine process still lives


class ProcessClient:
    """An EngineClient with a private local socket to the engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="quire-")
        address = f"ipc://{self._dir.name}/engine"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        command = [sys.executable, "-m", "quire.engine_process", address, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._dead: str | None = None
        self._outputs: list[EngineOutput] = []
        try:
            self._send(msg.Start(config))
            self.info = self._await_ready()
        except BaseException:
            self.close()
            raise

    def add(self, request: EngineRequest) -> None:
        self._send(msg.Add(request))

    def abort(self, ids: list[str]) -> None:
        self._send(msg.Abort(ids))

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        message = self._receive(timeout_s)
        return message.outputs if isinstance(message, msg.Outputs) else []

    def close(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(zmq.Again):
                self._socket.send(msg.encode(msg.Stop()), zmq.NOBLOCK)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._dead = self._dead or "it was closed"
        self._socket.close(linger=0)
        self._context.term()
        self._dir.cleanup()

    def _await_ready(self) -> EngineInfo:
        while True:
            if isinstance(message := self._receive(1.0), msg.Ready):
                return message.info

    def _send(self, message: msg.ToEngine) -> None:
        while not self._dead and not self._socket.poll(_LOOK_MS, zmq.POLLOUT):
            self._look_for_death()  # nobody is at the other end: not yet, or no longer
        if self._dead:
            raise EngineDead(f"the engine stopped: {self._dead}")
        self._socket.send(msg.encode(message))

    def _receive(self, timeout_s: float) -> msg.ToClient | None:
        """The next message, or None after `timeout_s`; raises what ended the engine."""
        if self._dead:
            raise EngineDead(f"the engine stopped: {self._dead}")
        if not self._socket.poll(int(timeout_s * 1000)):
            self._look_for_death()
            return None
        message = msg.decode_to_client(self._socket.recv())
        if isinstance(message, msg.Died):
            self._dead = message.cause
            error = getattr(types, message.kind, None)
            if isinstance(error, type) and issubclass(error, QuireError):
                raise error(message.cause)
            raise EngineDead(f"the engine stopped: {message.cause}")
        return message

    def _look_for_death(self) -> None:
        """Raise EngineDead if the process has ended and left no last words."""
        code = self._process.poll()
        if code is not None and not self._socket.poll(0):
            self._dead = f"its process ended with exit code {code}"
            raise EngineDead(f"the engine stopped: {self._dead}")
