"""`ReplicaSet`: all engine processes behind one API process, as if they were one engine.

submit()  a job waits for its turn (turns.py) until a replica has room, and goes to the one that the router picks
listener  is told of outputs, and of the end of the last replica

A replica that ends or hangs is replaced while another one serves. Its jobs without output are sent to other replicas,
once; the others end with an error. When the last replica ends, so does the set: a supervisor restarts the server. With one
replica nothing waits here, because the engine's own queue does the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.frontend.block_secret import block_secret
from quire.frontend.client import ipc as msg
from quire.frontend.client.replica_config import replica_config
from quire.serve.engine_process_client import EngineProcess
from quire.serve.replicas.job import EngineJob
from quire.serve.replicas.live_sum import LiveCursor, sum_live
from quire.serve.replicas.replica import Replica
from quire.serve.replicas.router import ReplicaRouter, make_router
from quire.serve.replicas.sums import add_loads, sum_figures, sum_info, sum_stats, totals_of
from quire.serve.replicas.turns import ClientTurns
from quire.serve.settings import RoutingPolicy
from quire.types import (
    EngineDead,
    EngineInfo,
    EngineLive,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Figures,
    RequestFailure,
)
from quire.types.block_names import BlockNames

log = logging.getLogger("quire.serve")
_YIELD_S = 0.005  # longest time to process queued outputs before the new tokens are sent to clients
_CHECK_S = 1.0  # interval at which heartbeats are checked
_FIRST_DELAY_S, _LONGEST_DELAY_S = (
    1.0,
    60.0,
)  # before a restart; doubles with every restart that does not last
_LASTING_S = 120.0  # after which a replica has proved itself, and the delay is the first one again
_MOST_RETRIES = 1  # of a job: a request that ends two engines may be the cause


class Listener(Protocol):
    """The owner of the jobs."""

    def take_outputs(self, outputs: Sequence[EngineOutput], figures: Figures) -> None:
        """Handle the outputs of one step of one replica, and its figures after the step."""
        ...

    def replicas_died(self, cause: str) -> None:
        """Handle the end of the last replica, and with it of all open jobs."""
        ...


class ReplicaSet:
    """The replicas of an engine, the jobs that wait for them, and the router between the two."""

    def __init__(
        self,
        config: EngineConfig,
        routing: RoutingPolicy = "prefix",
        start: Callable[[int, bytes], EngineProcess] | None = None,
        dry_run_step_s: float | None = None,
        sheds: bool = False,
    ) -> None:
        """Start the processes without waiting for them.

        Args:
            config: settings of an engine; `data_parallel_size` is the number of replicas.
            routing: name of the router.
            start: starts the process of a replica, given its number and the key of the names of blocks; None starts
                it on this host.
            dry_run_step_s: duration of a step of engines without a model; None loads the model.
            sheds: whether the owner asks for `cached_tokens` to decide about requests.
        """
        self._config, self._routing, self._sheds = config, routing, sheds
        secret = block_secret(config)

        def start_here(number: int, secret: bytes) -> EngineProcess:
            return EngineProcess(replica_config(config, number), dry_run_step_s, secret)

        begin = start or start_here
        self.replicas = [
            Replica(number, partial(begin, number, secret)) for number in range(config.data_parallel_size)
        ]
        self._secret = secret
        self._turns = ClientTurns()
        self._counts = itertools.count()
        self._submitted = 0  # engine requests
        self._credited: dict[EngineJob, int] = {}  # generated tokens that have been charged to the client
        self._tasks: set[asyncio.Task[None]] = set()
        self._cursors: dict[str | None, LiveCursor] = {}

    # ---------------------------------------------------------------------------------- lifetime

    async def ready(self) -> EngineInfo:
        """Wait until all engines are built. Return the description of all together.

        Raises:
            QuireError: the first error that prevented a start.
        """
        infos = await asyncio.gather(*(replica.ready() for replica in self.replicas))
        first = self.replicas[0].info
        self._router: ReplicaRouter = make_router(self._routing, first.block_size, first.prefix_caching)
        self._names = BlockNames(first.block_size, self._secret)
        routes = len(self.replicas) > 1 and self._router.reads_names
        self._reads_names = routes or (self._sheds and first.prefix_caching)
        return sum_info(infos)

    def listen(self, listener: Listener) -> None:
        """Hand what happens from now on to `listener`."""
        self._listener = listener
        for replica in self.replicas:
            self._start_task(self._receive(replica))
        self._start_task(self._watch())

    def _start_task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, kill: bool = False) -> None:
        """End all processes; `kill` skips their orderly shutdown."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(replica.process.close(kill) for replica in self.replicas))

    def kill(self) -> None:
        """Kill all processes."""
        for replica in self.replicas:
            replica.process.kill()

    # -------------------------------------------------------------------------------------- jobs

    @property
    def _serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.status == "serving"]

    @property
    def slots(self) -> int:
        """Return the number of request slots of all replicas that serve."""
        return sum(replica.info.max_num_seqs for replica in self._serving)

    def block_names(self, request: EngineRequest) -> list[bytes]:
        """Return the names by which the prompt of a request is found in prefix caches. Thread-safe.

        The list is empty if neither the router nor shedding reads them.
        """
        if not self._reads_names:
            return []
        if request.params.prompt_logprobs is not None or request.pooling == "mean":
            return []  # it cannot use cached tokens
        return self._names.short_names(request.cache_salt, request.prompt)

    def cached_tokens(self, names: list[bytes]) -> int:
        """Return the tokens at the beginning of a prompt that a replica has cached or is about to. Thread-safe.

        Prompts that wait for their turn count as about to be cached, so a burst of equal prompts counts once.
        A model with states can only go on from a snapshot, of which nothing is known here, so nothing counts as cached.
        """
        serving = self._serving
        if not names or not serving or serving[0].info.state_bytes:
            return 0
        awaited = self._turns.expected
        return serving[0].info.block_size * max(replica.cached_blocks(names, awaited) for replica in serving)

    def submit(self, job: EngineJob) -> None:
        """Send a job to a replica when it is its turn."""
        job.number = next(self._counts)
        job.priority = job.requests[0].priority if self._config.scheduling_policy == "priority" else 0
        self._submitted += len(job.requests)
        self._turns.add(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting jobs in turn, until the next one finds no room."""
        while (job := self._turns.first()) is not None and (room := self._with_room(job)):
            self._turns.take(job)
            self._router.choose(job, room).send(job)

    def _with_room(self, job: EngineJob) -> list[Replica]:
        """Return the replicas that may get a job: those with a free slot, or nearly so.

        A client that holds less than its share may send to all: an engine makes room for it by preemption.
        """
        serving = self._serving
        room = [r for r in serving if r.num_ahead(job.priority) < _window(r, len(self.replicas))]
        return room or ([] if self._turns.holds_its_share(job, self.slots) else serving)

    def abort(self, ids: Sequence[str]) -> None:
        """End the requests with these ids. Each one's last output has finish_reason "abort"."""
        sent: dict[int, list[str]] = {}
        for name in ids:
            for replica in self.replicas:
                if (job := replica.jobs.get(name)) is not None:
                    job.aborted = True
                    sent.setdefault(replica.number, []).append(name)
                    break
            else:
                self._abort_waiting(name)
        for number, names in sent.items():
            self.replicas[number].process.send(msg.Abort(names))

    def _abort_waiting(self, name: str) -> None:
        if (job := self._turns.remove(name)) is not None:
            self._confirm_abort(request.id for request in job.requests)
            self._dispatch()

    def _confirm_abort(self, ids: Iterable[str]) -> None:
        self._listener.take_outputs([EngineOutput(name, [], "abort") for name in ids], Figures())

    # ---------------------------------------------------------------------------------- messages

    async def _receive(self, replica: Replica) -> None:
        """Handle the messages of a replica until its process ends."""
        yielded_s = time.monotonic()
        try:
            while True:
                message = await replica.process.receive()
                # receive() does not suspend while messages are queued.
                if time.monotonic() - yielded_s > _YIELD_S:
                    await asyncio.sleep(0)
                    yielded_s = time.monotonic()
                match message:
                    case msg.Outputs():
                        replica.report(message)
                        outputs = message.outputs
                        self._listener.take_outputs(outputs, message.figures)
                        self._settle(replica, outputs.ended)
                    case msg.Stats() | msg.Live():
                        replica.answered(message)
                    case msg.Pong():
                        replica.heartbeat.beat()
        except Exception as error:  # any error must reach the open requests
            self._failed(
                replica, str(error) if isinstance(error, EngineDead) else f"the engine stopped: {error!r}"
            )

    def _settle(self, replica: Replica, ended: Sequence[EngineOutput]) -> None:
        """Count the requests that ended, and fill their places."""
        for output in ended:
            if (job := replica.end(output.id)) is not None:
                self._charge(job, 1, last=not job.open_ids)
        if ended:
            self._dispatch()

    def _charge(self, job: EngineJob, requests: int, last: bool) -> None:
        """Charge the client of a job for what was generated, and give back the places of `requests`."""
        generated, before = job.generated_tokens, self._credited.pop(job, 0)
        if not last:
            self._credited[job] = generated
        self._turns.end(job, requests, generated - before)

    # ---------------------------------------------------------------------------------- failures

    def _failed(self, replica: Replica, cause: str) -> None:
        """Move the jobs of a replica that has ended, and replace it. The last one takes the set along."""
        jobs = replica.fail(cause)
        for job in jobs:
            self._charge(job, len(job.open_ids), last=True)
        if not self._serving:
            self._listener.replicas_died(cause)
            return
        log.error("replica %d: %s; %d open requests", replica.number, cause, len(jobs))
        for job in jobs:
            self._retry(job, replica, cause)
        self._dispatch()
        self._start_task(self._restart(replica))

    def _retry(self, job: EngineJob, replica: Replica, cause: str) -> None:
        if job.aborted:  # the engine has ended before it could confirm that
            self._confirm_abort(sorted(job.open_ids))
            return
        if not job.has_begun and job.retries < _MOST_RETRIES:
            job.retries += 1
            self._turns.add(job)
            return
        why = "its answer had begun" if job.has_begun else "a retry on another replica failed too"
        failure = RequestFailure(
            f"replica {replica.number} failed ({cause}) and {why}; send the request again",
            internal=True,
            code="replica_failed",
        )
        outputs = [EngineOutput(name, [], "error", error=failure) for name in sorted(job.open_ids)]
        self._listener.take_outputs(outputs, Figures())

    async def _restart(self, replica: Replica) -> None:
        """Replace the process of a replica, with growing delays until one starts."""
        while replica.status != "serving":
            await replica.process.close(kill=True)
            await asyncio.sleep(self._delay_s(replica))
            replica.relaunch()
            try:
                await replica.ready()
            except Exception as error:
                replica.fail(str(error))
                log.error("replica %d did not start: %s", replica.number, error)
        log.warning("replica %d serves again", replica.number)
        self._start_task(self._receive(replica))
        self._dispatch()

    def _delay_s(self, replica: Replica) -> float:
        """Return the time to wait before a restart, which doubles with every process that did not last."""
        replica.failures = 1 if replica.served_s > _LASTING_S else replica.failures + 1
        return min(_FIRST_DELAY_S * 2 ** (replica.failures - 1), _LONGEST_DELAY_S)

    async def _watch(self) -> None:
        """Check the heartbeats. A replica that hangs is killed while another one serves."""
        while True:
            for replica in self._serving:
                replica.heartbeat.check()
                silent_s = replica.heartbeat.overdue_s()
                if silent_s and len(self._serving) > 1:
                    log.error(
                        "replica %d has not answered for %.0f s; it is killed", replica.number, silent_s
                    )
                    replica.process.end()
            await asyncio.sleep(_CHECK_S)

    # ------------------------------------------------------------------------------------ state

    def silent_s(self) -> float:
        """Return for how long no replica has answered, or 0 if one of them is responsive."""
        return min((replica.heartbeat.overdue_s() for replica in self._serving), default=0.0)

    @property
    def num_held(self) -> int:
        """Return the number of engine requests that wait here for a replica."""
        return self._turns.num_waiting

    @property
    def load(self) -> EngineLoad:
        """Return the load of all replicas. `received` excludes jobs that wait here."""
        total = add_loads(replica.load for replica in self.replicas)
        unseen = sum(replica.sent for replica in self.replicas) - total.received
        total.received = self._submitted - self._turns.num_waiting - unseen
        return total

    @property
    def figures(self) -> Figures:
        """Return the latest figures of all replicas together."""
        return sum_figures([r.figures for r in self.replicas], [r.info.num_blocks for r in self.replicas])

    async def stats(self, owner: str | None) -> EngineStats:
        """Return the statistics of all replicas together, of one client or (None) of all. Raises EngineDead."""
        found = await _answers({r: r.ask(msg.AskStats(owner), msg.Stats) for r in self._serving})
        past = [r.past if r in found else r.figures for r in self.replicas]
        return sum_stats(list(found.values()), [totals_of(figures) for figures in past])

    async def live(self, since: int, owner: str | None) -> EngineLive:
        """Return the state of all replicas and their steps after combined step `since`. Raises EngineDead."""
        cursor = self._cursors.setdefault(owner, LiveCursor(len(self.replicas)))
        cursor.resume(since)
        before = {r: r.past.totals.steps for r in self._serving}
        found: dict[Replica, EngineLive] = await _answers(
            {
                r: r.ask(msg.AskLive(cursor.since(r.number, steps), owner), msg.Live)
                for r, steps in before.items()
            }
        )
        new = [(r.number, before[r], live.steps) for r, live in found.items()]
        return sum_live(list(found.values()), cursor.combine(new))


async def _answers(asked: Mapping[Replica, asyncio.Future[Any]]) -> dict[Replica, Any]:
    """Return the answers of the replicas that do not end meanwhile. Raise EngineDead if none is left."""
    await asyncio.wait(asked.values())
    found = {r: one.result() for r, one in asked.items() if not one.cancelled() and one.exception() is None}
    if not found:
        raise EngineDead("every replica ended while it was asked")
    return found


def _window(replica: Replica, replicas: int) -> float:
    """Return the number of requests that a replica gets at once: its slots, and an eighth to refill them."""
    slots = replica.info.max_num_seqs
    return math.inf if replicas == 1 else slots + max(1, slots // 8)
