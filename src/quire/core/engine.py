"""The step loop: schedule, launch, retire. It owns the queue of launched steps.

With depth 1 each step is retired before the next one is scheduled. With depth 2 the host schedules step n + 1 while the
device runs step n (overlap). Scheduler and executor are the same in both cases.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from contextlib import ExitStack

from quire.core.cache_journal import CacheJournal, NoJournal
from quire.core.grammar_interface import Grammar
from quire.core.scheduler import ScheduledStep, Scheduler
from quire.core.steplog import StepLog, StepRecord
from quire.types import (
    EngineOutputs,
    EngineRequest,
    Executor,
    OutputPart,
    StepFailed,
    StepHandle,
    one_by_one,
)


class Engine:
    """An engine: a scheduler and an executor, joined by the step loop.

    It is closed by `close`, when it is garbage-collected, or at the end of the interpreter, whichever comes first: its
    parts own processes and threads.

    Args:
        scheduler: decides what each step runs.
        executor: runs the steps.
        grammar: structured output.
        depth: number of launched steps at which the oldest one is retired.
        log: the log to which the scheduler appends.
        check_invariants: check the scheduler after every step.
        journal: what the prefix cache began and ceased to hold, for clients.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        grammar: Grammar,
        depth: int,
        log: StepLog,
        check_invariants: bool = False,
        journal: CacheJournal | None = None,
    ) -> None:
        self.scheduler, self.executor, self.grammar = scheduler, executor, grammar
        self.depth, self.log = depth, log
        self.journal = journal or NoJournal()
        self._check = check_invariants
        self._in_flight: deque[tuple[StepRecord, StepHandle]] = deque()
        self._outputs: list[OutputPart] = []
        self._closing = weakref.finalize(self, _close, self._in_flight, scheduler, executor, grammar)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it could never run."""
        if request.grammar is None:
            self.scheduler.add(request)
        else:
            self.scheduler.add(request, held="grammar")
            self.grammar.start(request)

    def abort(self, request_id: str) -> None:
        """End a request. Its last output has finish_reason "abort"."""
        self.scheduler.abort(request_id)
        self.grammar.forget(request_id)

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do."""
        return bool(self._outputs) or self.scheduler.has_work

    def step(self) -> EngineOutputs:
        """Launch a step if a request can run, and retire the oldest step if the queue is full or nothing can run.

        Returns:
            The outputs of the retired steps, and of requests that ended otherwise.
        """
        begin = time.perf_counter()
        self._settle()
        scheduled, connector = self.scheduler.schedule(), self.scheduler.connector
        connector.plan()
        if scheduled:
            scheduled.record.schedule_s = time.perf_counter() - begin
            try:
                self._launch(scheduled)
            except StepFailed as error:
                self._give_up(str(error))
        if self._in_flight and (len(self._in_flight) >= self.depth or not scheduled):
            self._retire_oldest()
        if self._check:
            self.scheduler.check()
        outputs, self._outputs = self._outputs + self.scheduler.take_outputs(), []
        if not (scheduled or outputs):
            if connector.busy:
                connector.wait()
            else:
                self.grammar.wait()
        return EngineOutputs(outputs)

    def _launch(self, scheduled: ScheduledStep) -> None:
        plan, record = scheduled
        begin = time.perf_counter()
        self.executor.forward(plan)
        if self.grammar.needs_tokens(plan):  # the device runs `plan` in the meantime
            while self._in_flight:
                self._retire_oldest()
        masks = self.grammar.masks(plan, self.executor.drafts)
        self._settle()
        handle = self.executor.sample(plan.step, masks)
        record.launch_s = time.perf_counter() - begin
        # A CPU computes while it launches: the step has ended, although it is retired later.
        if not handle.is_timed and handle.ready():
            record.ready_s = self.log.now()
        self._in_flight.append((record, handle))

    def _give_up(self, error: str) -> None:
        """End the requests of the step whose launch failed. Steps in flight are older and not affected."""
        while self._in_flight:
            self._retire_oldest()
        self.scheduler.fail(error)
        outputs = self.scheduler.take_outputs()
        for output in one_by_one(outputs):
            self.grammar.forget(output.id)
        self._outputs += outputs

    def _settle(self) -> None:
        """Pause requests whose mask is late, resume those that are ready, and end those that cannot continue."""
        for request_id, drops_token in self.grammar.paused():
            self.scheduler.pause(request_id, drops_token)
        for request_id, error, drafts in self.grammar.settled():
            self.scheduler.settle(request_id, error, drafts)

    def _retire_oldest(self) -> None:
        record, handle = self._in_flight.popleft()
        begin = time.perf_counter()
        result = handle.wait()
        arrived = time.perf_counter()
        self.scheduler.retire(result)
        outputs = self.scheduler.take_outputs()
        self.grammar.advance(outputs)
        self._outputs += outputs
        record.wait_s, record.retire_s = arrived - begin, time.perf_counter() - arrived

    def idle(self) -> bool:
        """Prepare something that makes later steps faster. Return False if nothing is left to prepare."""
        self.scheduler.hear()
        return self.executor.warm_up()

    def check(self) -> None:
        """Check the invariants of the scheduler. Clients call this when the engine becomes idle.

        Raises:
            AssertionError: if an invariant is broken.
        """
        self.scheduler.check()

    def close(self) -> None:
        """Drop the steps in flight and release connector, executor and grammar. A second call does nothing."""
        self._closing()


def _close(
    in_flight: deque[tuple[StepRecord, StepHandle]],
    scheduler: Scheduler,
    executor: Executor,
    grammar: Grammar,
) -> None:
    """Close the parts of an engine, each of them also if another one fails to close."""
    in_flight.clear()
    with ExitStack() as parts:
        for part in (grammar, executor, scheduler.connector):
            parts.callback(part.close)
