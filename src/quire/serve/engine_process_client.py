"""The engine process as the event loop sees it: a child process and a channel of messages.

EngineProcess(...)  start the process without waiting: it imports torch while this process imports HTTP libraries
await ready()       return EngineInfo, or raise the error that prevented the start
await receive()     return the next message, or raise EngineDead with the cause after the process has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from quire import types
from quire.config import EngineConfig
from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import frame
from quire.frontend.client.process import start_engine_process
from quire.serve.engine_heartbeat import cpu_of
from quire.types import EngineDead, EngineInfo, QuireError

_STOP_S = 5.0  # for an orderly shutdown of the process


class EngineProcess:
    """The child process and this end of its channel, both owned here."""

    def __init__(
        self, config: EngineConfig, dry_run_step_s: float | None = None, secret: bytes | None = None
    ) -> None:
        self._start = msg.StartEngine(config, dry_run_step_s, secret)
        # In a separate process group, Ctrl-C in a terminal reaches only this process, which first drains open requests.
        self._process, self._channel = start_engine_process(process_group=0)
        self._cpu_s = cpu_of(self._process.pid)
        self._dead: str | None = None
        self._ended = asyncio.Event()
        self._news = asyncio.Event()  # set by a new message and by the end of the process

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the processor time in seconds that the process has used."""
        return self._cpu_s()

    async def ready(self) -> EngineInfo:
        """Send the settings and wait until the engine is built.

        Raises:
            ConfigError: if the settings do not fit the model or the machine.
            ModelError: if the model cannot be loaded.
            EngineDead: if the process ends.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._news.set)
        threading.Thread(target=self._watch, daemon=True, name="engine-watch").start()
        self.send(self._start)
        while True:
            if isinstance(message := await self.receive(), msg.EngineReady):
                return message.info

    def _watch(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended.set)
            self._loop.call_soon_threadsafe(self._news.set)

    def send(self, message: msg.ToEngine) -> None:
        """Queue a message. If the engine is dead, the message is dropped silently; `receive` raises the error."""
        self.send_frames(frame(msg.encode(message)))

    def send_frames(self, frames: bytes) -> None:
        """Queue messages that are already encoded as frames of the channel."""
        if self._dead is None and not self._channel.send_frames(frames):
            self._loop.add_writer(self._channel.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        if self._channel.flush():
            self._loop.remove_writer(self._channel.fileno())

    async def receive(self) -> msg.ToClient:
        """Return the next message.

        Raises:
            EngineDead: if the process has ended.
            QuireError: the error that the engine reported as the cause of its end.
        """
        if self._dead is None and await self._has_message():
            message = msg.decode_to_client(self._channel.receive())
            if not isinstance(message, msg.EngineFailed):
                return message
            self._dead = message.cause
            error = getattr(types, message.kind, None)
            if isinstance(error, type) and issubclass(error, QuireError) and error is not EngineDead:
                raise error(message.cause)
        raise EngineDead(f"the engine stopped: {self._dead}")

    async def _has_message(self) -> bool:
        """Wait for a message. Return False once the process has ended and all its messages are read."""
        try:
            while not self._channel.poll():
                if self._ended.is_set():
                    raise EOFError
                self._news.clear()
                await self._news.wait()
        except EOFError:
            self._loop.remove_reader(self._channel.fileno())
            await self._ended.wait()
            self._dead = self._dead or f"its process ended with exit code {self._process.returncode}"
            return False
        return True

    async def close(self, kill: bool = False) -> None:
        """End the process: ask it to stop, then kill it after 5 seconds or, with `kill`, at once. Closes once."""
        if self._channel.fileno() < 0:
            return
        if not kill and self._process.poll() is None:
            self.send(msg.StopEngine())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _STOP_S)
        loop, file = asyncio.get_running_loop(), self._channel.fileno()
        loop.remove_reader(file)
        loop.remove_writer(file)
        self.kill()

    def end(self) -> None:
        """Kill the process without waiting; `receive` then raises EngineDead."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the process and close the channel."""
        self._dead = self._dead or "it was closed"
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._channel.close()
