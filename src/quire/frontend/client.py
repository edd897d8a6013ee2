"""Engine clients: one protocol, with the engine in this process or in another one.

A client sends EngineRequests and receives EngineOutputs; a request that the engine refuses comes back as
an output with finish_reason "error". When the engine dies every call raises EngineDead with the cause.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Protocol

import zmq

from quire import types
from quire.config import EngineConfig
from quire.frontend import messages as msg
from quire.types import EngineDead, EngineInfo, EngineOutput, EngineRequest, QuireError, RequestError

if TYPE_CHECKING:
    from quire.core.engine import Engine

_LOOK_MS = 200  # how often a waiting client looks whether the engine process still lives


class EngineClient(Protocol):
    info: EngineInfo

    def add(self, request: EngineRequest) -> None: ...

    def abort(self, ids: list[str]) -> None: ...

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """Outputs that are there, waiting at most `timeout_s` for the first."""
        ...

    def close(self) -> None: ...


class InProcessClient:
    """Runs the step loop inside `poll`."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self._refused: list[EngineOutput] = []
        self._dead: str | None = None

    def add(self, request: EngineRequest) -> None:
        self._raise_if_dead()
        try:
            self.engine.add(request)
        except RequestError as error:
            self._refused.append(refusal(request, error))

    def abort(self, ids: list[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        self._raise_if_dead()
        outputs, self._refused = self._refused, []
        try:
            if self.engine.has_work:
                outputs += self.engine.step()
                if not self.engine.has_work:
                    self.engine.check()
        except Exception as error:
            self._dead = describe(error)
            raise EngineDead(f"the engine stopped: {self._dead}") from error
        return outputs

    def close(self) -> None:
        self._dead = self._dead or "it was closed"
        self.engine.close()

    def _raise_if_dead(self) -> None:
        if self._dead:
            raise EngineDead(f"the engine stopped: {self._dead}")


class ProcessClient:
    """The engine in a child process, reached over ZeroMQ on a private local socket."""

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


def refusal(request: EngineRequest, error: RequestError) -> EngineOutput:
    """The final output of a request that the engine did not take."""
    return EngineOutput(request.id, [], "error", error=str(error))


def describe(error: BaseException) -> str:
    """One line for people: the text of our own errors, class and text of others."""
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
