"""The engine process as the event loop sees it: started before everything else, spoken to over ZeroMQ.

EngineProcess(...)  -> the process runs, nothing is awaited: it imports torch while we import HTTP
await ready()       -> EngineInfo, or the error that kept it from starting
await receive()     -> messages; raises EngineDead, with the cause, when the process has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

import zmq
import zmq.asyncio

from quire import types
from quire.config import EngineConfig
from quire.frontend import messages as msg
from quire.types import EngineDead, EngineInfo, QuireError

_STOP_S = 5.0  # how long the process may take to end in order
_LAST_WORDS_S = 0.05  # from its end until what it sent must have arrived


class EngineProcess:
    """Owns the child process, its socket and the folder of the socket."""

    def __init__(self, config: EngineConfig, dry_run_step_s: float | None = None) -> None:
        self._start = msg.Start(config, dry_run_step_s)
        self._dir = tempfile.TemporaryDirectory(prefix="quire-")
        address = f"ipc://{self._dir.name}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        command = [sys.executable, "-m", "quire.engine_process", address, str(os.getpid())]
        # A group of its own: Ctrl-C in a terminal reaches us alone, and we end it when its requests are done.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        self._dead: str | None = None
        self._ended = asyncio.Event()
        self._next: asyncio.Future[Any] | None = None  # what `receive` waits for

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> EngineInfo:
        """Send the settings and wait until the engine is built. Raises ConfigError, ModelError or EngineDead."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), daemon=True, name="engine-watch").start()
        self.send(self._start)
        while True:
            if isinstance(message := await self.receive(), msg.Ready):
                return message.info

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._ended.set)
            loop.call_soon_threadsafe(loop.call_later, _LAST_WORDS_S, self._give_up)

    def _give_up(self) -> None:
        """The process has ended: once its last words are read, nothing comes any more."""
        if self._dead is not None or self._socket.closed:
            return
        events = self._socket.getsockopt(zmq.EVENTS)
        if isinstance(events, int) and events & zmq.POLLIN:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._give_up)
            return
        self._dead = f"its process ended with exit code {self._process.returncode}"
        if self._next is not None:
            self._next.cancel()

    def send(self, message: msg.ToEngine) -> None:
        """Queue a message. It is lost without a word when the engine dies; `receive` says so."""
        if self._dead is None:
            # pyzmq keeps the order, and the future that we do not need
            self._socket.send(msg.encode(message))

    async def receive(self) -> msg.ToClient:
        """The next message. Raises EngineDead, or the error that the engine ended with."""
        if self._dead is None:
            pending = self._next = asyncio.ensure_future(self._socket.recv())
            try:
                message = msg.decode_to_client(await pending)
            except asyncio.CancelledError:
                if self._dead is None:  # it is the caller that was cancelled
                    raise
            else:
                if not isinstance(message, msg.Died):
                    return message
                self._dead = message.cause
                error = getattr(types, message.kind, None)
                if isinstance(error, type) and issubclass(error, QuireError) and error is not EngineDead:
                    raise error(message.cause)
        raise EngineDead(f"the engine stopped: {self._dead}")

    async def close(self, kill: bool = False) -> None:
        """End the process, in order if it answers within some seconds."""
        if not kill and self._process.poll() is None:
            self.send(msg.Stop())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _STOP_S)
        self.kill()

    def kill(self) -> None:
        """End the process now, and give everything back."""
        self._dead = self._dead or "it was closed"
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._socket.close(linger=0)
        self._context.term()
        self._dir.cleanup()
