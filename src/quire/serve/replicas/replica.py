"""One engine process behind the API process: its state, its open jobs, what its cache holds, and its restarts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Container
from typing import Any, Literal

from quire.frontend.client import ipc as msg
from quire.serve.engine_heartbeat import Heartbeat
from quire.serve.engine_process_client import EngineProcess
from quire.serve.replicas.job import EngineJob, ExpectedBlocks
from quire.serve.replicas.sums import add_figures
from quire.types import EngineDead, EngineInfo, EngineLoad, Figures
from quire.types.block_names import NameChanges, split_names

ReplicaStatus = Literal["starting", "serving", "failed"]


class Replica:
    """An engine process that is replaced when it ends, under one number.

    Everything known about the engine is that of the current process, except `figures`, whose counters go on.
    """

    def __init__(self, number: int, start: Callable[[], EngineProcess]) -> None:
        """Start the first process; `start` returns a new one without waiting for it."""
        self.number = number
        self._start = start
        self.restarts = self.failures = 0
        self.served_s = 0.0  # how long the process before the present one served
        self._ready_s = 0.0  # when the present process was ready
        self.cause: str | None = None  # of the latest end
        self.past = Figures()  # of the processes that have ended
        self._launch()

    def _launch(self) -> None:
        self.process = process = self._start()
        self.status: ReplicaStatus = "starting"
        self.load = EngineLoad()
        self._figures = Figures()
        self.sent = 0  # engine requests
        self.jobs: dict[str, EngineJob] = {}  # by the id of each request that is open here
        self._by_priority: Counter[int] = Counter()  # open requests
        self._cached: set[bytes] = set()  # short names of blocks that the engine can find
        self._expected = ExpectedBlocks()  # those of open jobs, whose blocks may not be computed yet
        self._questions: dict[type, deque[asyncio.Future[Any]]] = {msg.Stats: deque(), msg.Live: deque()}
        self.heartbeat = Heartbeat(lambda: process.send(msg.Ping()), process.cpu_s)

    async def ready(self) -> EngineInfo:
        """Wait until the engine is built. Raises as `EngineProcess.ready`."""
        self.info = await self.process.ready()
        self.status, self._ready_s = "serving", time.monotonic()
        return self.info

    @property
    def health(self) -> str:
        """Return the status, or `stalled` if the engine serves but has not answered for long."""
        return "stalled" if self.status == "serving" and self.heartbeat.overdue_s() else self.status

    def relaunch(self) -> None:
        """Start a new process in place of one that has ended."""
        self.past = self.figures
        self.restarts += 1
        self._launch()

    # -------------------------------------------------------------------------------------- jobs

    @property
    def num_open(self) -> int:
        """Return the number of engine requests that were sent and have not ended."""
        return len(self.jobs)

    def num_ahead(self, priority: int) -> int:
        """Return the number of open requests that go before a new one of this priority."""
        return sum(count for other, count in self._by_priority.items() if other <= priority)

    def send(self, job: EngineJob) -> None:
        """Send a job to the engine."""
        job.open_ids = {request.id for request in job.requests}
        for name in job.open_ids:
            self.jobs[name] = job
        self.sent += len(job.requests)
        self._by_priority[job.priority] += len(job.requests)
        self._expected.add(job)
        self.process.send_frames(job.frames)

    def end(self, request_id: str) -> EngineJob | None:
        """Count the end of a request, and return its job."""
        job = self.jobs.pop(request_id, None)
        if job is None:
            return None
        job.open_ids.discard(request_id)
        self._by_priority[job.priority] -= 1
        if not self._by_priority[job.priority]:
            del self._by_priority[job.priority]
        if not job.open_ids:
            self._expected.remove(job)
        return job

    # ------------------------------------------------------------------------------------- cache

    def cached_blocks(self, names: list[bytes], awaited: Container[bytes] = ()) -> int:
        """Return the number of blocks at the beginning of a prompt that are cached here or about to be.

        Args:
            names: the names of the blocks.
            awaited: names that count as cached too.
        """
        cached, expected = self._cached, self._expected
        for count, name in enumerate(names):
            if name not in cached and name not in expected and name not in awaited:
                return count
        return len(names)

    def _apply(self, names: NameChanges) -> None:
        if names.added:
            self._cached.update(split_names(names.added))
        if names.removed:
            self._cached.difference_update(split_names(names.removed))

    # ----------------------------------------------------------------------------------- figures

    @property
    def figures(self) -> Figures:
        """Return the engine's figures, with the counters of the processes before it."""
        return add_figures(self._figures, self.past) if self.restarts else self._figures

    def report(self, message: msg.Outputs) -> None:
        """Take the figures of a message."""
        self.load, self._figures = message.load, message.figures
        self._apply(message.names)

    # --------------------------------------------------------------------------------- questions

    def ask(self, question: msg.AskStats | msg.AskLive, answer: type) -> asyncio.Future[Any]:
        """Send a question; the engine answers in order. The future raises EngineDead if the engine ends before."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[answer].append(future)
        self.process.send(question)
        return future

    def answered(self, message: msg.Stats | msg.Live) -> None:
        """Hand an answer to the oldest question of its kind, which may be cancelled."""
        waiting = self._questions[type(message)].popleft()
        if not waiting.done():
            waiting.set_result(message.stats if isinstance(message, msg.Stats) else message.live)

    def fail(self, cause: str) -> list[EngineJob]:
        """Note that the process has ended. Return its open jobs, and fail its open questions."""
        self.served_s = time.monotonic() - self._ready_s if self.status == "serving" else 0.0
        self.status, self.cause = "failed", cause
        jobs = list(dict.fromkeys(self.jobs.values()))
        for future in (one for waiting in self._questions.values() for one in waiting):
            if not future.done():
                future.set_exception(EngineDead(cause))
        self.jobs, self.load = {}, EngineLoad()
        self._cached, self._expected, self._by_priority = set(), ExpectedBlocks(), Counter()
        self.sent = 0
        return jobs
