"""The prefill processes of a decode engine: engines that compute prompts and show their blocks in shared memory.

The decode engine starts them and ends them. A process that dies is replaced in the background, up to three times; the
prompts that it had are computed by the decode engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Protocol

from quire.config import EngineConfig
from quire.frontend.client import ipc as msg
from quire.frontend.client.process import start_engine_process
from quire.types import EngineDead, EngineInfo, EngineRequest, PrefillNews, SharedBlocks

log = logging.getLogger("quire")

_RESTARTS = 3
_STOP_S = 2.0


class PeerListener(Protocol):
    """What is told of prefill engines that are up, and of those that have ended."""

    def add_peer(self, number: int, memory: int, shared: SharedBlocks | None) -> None:
        """Note that an engine is up: its number, its shared file and the description of its blocks."""
        ...

    def drop_peer(self, number: int) -> None:
        """Note that an engine has ended."""
        ...


class _PrefillProcess:
    """One process, and the requests that it has."""

    def __init__(self, number: int, config: EngineConfig, secret: bytes) -> None:
        self.number, self._config, self._secret = number, config, secret
        self.restarts, self.cause = 0, ""
        self.info: EngineInfo | None = None  # while it is up
        self.open: set[str] = set()
        self._start()

    def _start(self) -> None:
        self.memory = _unnamed_file()
        self.process, self.channel = start_engine_process(inherit=(self.memory,))
        self.channel.send(msg.encode(msg.StartEngine(self._config, secret=self._secret, exports=self.memory)))

    def restart(self) -> None:
        """Replace the process, which has ended."""
        self.close()
        self.restarts += 1
        self._start()

    def receive(self) -> list[msg.ToClient]:
        """Return the messages that have arrived. Raises EOFError once the process has ended."""
        self.channel.flush()
        found = []
        while self.channel.poll():
            found.append(msg.decode_to_client(self.channel.receive()))
        return found

    def exit_text(self) -> str:
        """Return how the process ended."""
        code = self.process.wait()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"prefill {self.number} (process {self.process.pid}) ended with {ended}"

    def close(self) -> None:
        """Kill the process and close its memory here. What has been mapped stays readable."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.channel.close()
        if self.memory >= 0:  # otherwise it is closed already
            os.close(self.memory)
        self.memory = -1


class PrefillProcesses:
    """The prefill engines of one decode engine.

    Args:
        configs: settings of each.
        secret: key of the names of blocks, which all engines share.
        listener: is told when an engine is up, and when it has ended.
    """

    def __init__(self, configs: Sequence[EngineConfig], secret: bytes, listener: PeerListener) -> None:
        self.listener = listener
        self.processes: list[_PrefillProcess] = []
        try:
            for number, config in enumerate(configs):
                self.processes.append(_PrefillProcess(number, config, secret))
        except BaseException:
            self.close()
            raise

    def await_ready(self) -> None:
        """Wait until all engines are up. Raises the error that prevented a start."""
        for one in self.processes:
            while one.info is None:
                try:
                    one.channel.poll(0.2)
                    self._take(one)
                except EOFError:
                    raise EngineDead(one.cause or one.exit_text()) from None

    def _take(self, one: _PrefillProcess) -> list[PrefillNews]:
        news: list[PrefillNews] = []
        for message in one.receive():
            match message:
                case msg.EngineReady(info):
                    one.info, one.cause = info, ""
                    self.listener.add_peer(one.number, one.memory, info.shared)
                case msg.EngineFailed(_, cause):
                    one.cause = cause
                case msg.Outputs():
                    for output in message.outputs:
                        reason = output.finish_reason
                        if output.id in one.open:
                            ended, failed = reason is not None, reason == "error"
                            news.append(PrefillNews(output.id, output.exported or (), ended, failed))
        return news

    def submit(self, request: EngineRequest) -> int | None:
        up = [one for one in self.processes if one.info is not None and one.process.poll() is None]
        if not up:
            return None
        one = min(up, key=lambda process: len(process.open))
        one.open.add(request.id)
        one.channel.send(msg.encode(msg.Add(request)))
        return one.number

    def release(self, request_id: str) -> None:
        for one in self.processes:
            if request_id in one.open:
                one.open.remove(request_id)
                one.channel.send(msg.encode(msg.Abort([request_id])))

    def news(self) -> list[PrefillNews]:
        found = []
        for one in self.processes:
            try:
                found += self._take(one)
            except EOFError:
                found += self._lose(one)
        return found

    def _lose(self, one: _PrefillProcess) -> list[PrefillNews]:
        """Report the end of the requests of a process that has ended, and replace it."""
        if not one.cause.startswith("prefill"):
            one.cause = one.exit_text() + (f": {one.cause}" if one.cause else "")
            log.warning("%s; the decode engine computes its prompts", one.cause)
        lost, one.open, one.info = one.open, set(), None
        self.listener.drop_peer(one.number)  # before the new process takes its memory
        if one.restarts < _RESTARTS:
            one.restart()
        return [PrefillNews(name, ended=True) for name in lost]

    def notes(self) -> list[str]:
        return [one.cause for one in self.processes if one.info is None]

    def close(self) -> None:
        for one in self.processes:
            one.channel.send(msg.encode(msg.StopEngine()))
            one.channel.settle(_STOP_S)
        for one in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(_STOP_S)
            one.close()


def _unnamed_file() -> int:
    """Return the descriptor of a file in memory, or of a deleted file where there are none (macOS)."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-blocks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
