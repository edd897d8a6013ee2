"""Replicas whose engine processes are threads of this process, behind the real router, channels and messages."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from quire import engine_process
from quire.config import EngineConfig
from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import Channel, frame
from quire.frontend.output import OutputAssembler, RequestState
from quire.host import build_engine
from quire.serve import engine_process_client
from quire.serve.replicas.job import EngineJob
from quire.serve.replicas.replica_set import ReplicaSet
from quire.types import EngineOutput, EngineRequest, Figures

_ANSWER_S = 60.0  # longest wait for the next output


class EngineThread:
    """An engine that runs in a thread, with the attributes of its process."""

    pid, returncode = os.getpid(), 1

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self._ours = ours
        self._thread = threading.Thread(target=self._run, args=(Channel(theirs),), daemon=True)
        self._thread.start()

    def _run(self, channel: Channel) -> None:
        try:
            channel.poll(60.0)
            start = msg.decode_to_engine(channel.receive())
            assert isinstance(start, msg.StartEngine)
            engine, info = build_engine(start.config, secret=start.secret)
            channel.send(msg.encode(msg.EngineReady(info)))
            engine_process.serve(engine, channel, os.getppid())
            engine.close()
        except EOFError:  # killed
            pass
        except BaseException as error:
            traceback.print_exc(limit=-4)
            channel.send(msg.encode(msg.EngineFailed(type(error).__name__, str(error))))
        finally:
            channel.close()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self.returncode

    def kill(self) -> None:
        self._ours.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return self.returncode


def _start_thread(**_: Any) -> tuple[EngineThread, Channel]:
    ours, theirs = socket.socketpair()
    return EngineThread(ours, theirs), Channel(ours)


class ReplicatedEngine:
    """All replicas of a configuration, used like one engine by one thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._assembler = OutputAssembler()
        self._outputs: list[EngineOutput] = []
        self._open: set[str] = set()
        self._cause = ""
        self._await(self._start(config))

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    async def _start(self, config: EngineConfig) -> None:
        self._news = asyncio.Event()
        self.set = ReplicaSet(config)
        await self.set.ready()
        self.set.listen(self)

    def take_outputs(self, outputs: Sequence[EngineOutput], figures: Figures) -> None:
        self._outputs += outputs
        self._assembler.apply(outputs)
        self._open -= {output.id for output in outputs if output.finish_reason is not None}
        self._news.set()

    def replicas_died(self, cause: str) -> None:
        self._cause = cause
        self._news.set()

    def add(self, request: EngineRequest) -> None:
        state = RequestState(request.id, None, [request], None)
        self._assembler.add(state)
        self._open.add(request.id)

        async def submit() -> None:
            names = self.set.block_names(request)
            self.set.submit(EngineJob(state, [request], frame(msg.encode(msg.Add(request))), names))

        self._await(submit())

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._outputs)

    def step(self) -> list[EngineOutput]:
        """Wait for the outputs of a step of any replica, and return them."""

        async def wait() -> None:
            if not self._outputs:
                self._news.clear()
                await asyncio.wait_for(self._news.wait(), _ANSWER_S)

        self._await(wait())
        assert not self._cause, self._cause
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def log(self) -> Figures:
        """The figures of all replicas, whose `totals` are those of a step log."""
        return self.set.figures

    def close(self) -> None:
        self._await(self.set.close())
        self._loop.close()


@contextmanager
def thread_replicas(config: EngineConfig) -> Iterator[ReplicatedEngine]:
    """Build the replicas of a configuration as threads, and close them at the end. All of them must have been used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process_client, "start_engine_process", _start_thread)
        engine = ReplicatedEngine(config)
        try:
            yield engine
            assert all(replica.figures.totals.requests for replica in engine.set.replicas)
        finally:
            engine.close()
