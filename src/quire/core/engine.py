"""The step loop: schedule, launch, retire. Owns the queue of steps in flight and nothing else.

With depth 1 a step is retired before the next is made; with depth 2 the host schedules step n + 1 while
the device runs step n (overlap). Neither the scheduler nor the executor knows which.
"""

from __future__ import annotations

import time
from collections import deque

from quire.core.grammar import Grammar
from quire.core.scheduler import Scheduler
from quire.core.steplog import StepLog, StepRecord
from quire.types import EngineOutput, EngineRequest, Executor, StepFailed, StepHandle, StepPlan


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        grammar: Grammar,
        depth: int,
        log: StepLog,
        check_invariants: bool = False,
    ) -> None:
        self.scheduler, self.executor, self.grammar = scheduler, executor, grammar
        self.depth, self.log = depth, log
        self._check = check_invariants
        self._in_flight: deque[tuple[StepRecord, StepHandle]] = deque()
        self._outputs: list[EngineOutput] = []

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises RequestError when it could never run."""
        if request.grammar is None:
            self.scheduler.add(request)
        else:
            self.scheduler.add(request, held="grammar")
            self.grammar.start(request)

    def abort(self, request_id: str) -> None:
        """End a request; its final output has finish_reason "abort"."""
        self.scheduler.abort(request_id)
        self.grammar.forget(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._outputs) or self.scheduler.has_work

    def step(self) -> list[EngineOutput]:
        """Launch one step if anybody can run, retire the oldest if the queue is full or nobody can."""
        begin = time.perf_counter()
        self._settle()
        plan = self.scheduler.schedule()
        if plan:
            self.log.last.schedule_s = time.perf_counter() - begin
            try:
                self._launch(plan)
            except StepFailed as error:
                self._give_up(str(error))
        while self._in_flight and (len(self._in_flight) >= self.depth or not plan):
            self._retire_oldest()
        if self._check:
            self.scheduler.check()
        outputs, self._outputs = self._outputs + self.scheduler.take_outputs(), []
        if not (plan or outputs):
            self.grammar.wait()
        return outputs

    def _launch(self, plan: StepPlan) -> None:
        record, begin = self.log.last, time.perf_counter()
        self.executor.forward(plan)
        if self.grammar.needs_tokens(plan):  # the device is busy with `plan` meanwhile
            while self._in_flight:
                self._retire_oldest()
        masks = self.grammar.masks(plan)
        self._settle()
        handle = self.executor.sample(plan.step, masks)
        record.launch_s = time.perf_counter() - begin
        self._in_flight.append((record, handle))

    def _give_up(self, error: str) -> None:
        """End the requests of the step that was not launched. Steps in flight are older, and not affected."""
        while self._in_flight:
            self._retire_oldest()
        self.scheduler.fail(error)
        outputs = self.scheduler.take_outputs()
        for output in outputs:
            self.grammar.forget(output.id)
        self._outputs += outputs

    def _settle(self) -> None:
        """Pause requests whose mask is late, let run those that are ready, and end those that cannot go on."""
        for request_id, drops_token in self.grammar.paused():
            self.scheduler.pause(request_id, drops_token)
        for request_id, error in self.grammar.settled():
            self.scheduler.settle(request_id, error)

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
        """Use a moment without work to make later steps cheaper; False: nothing is left to prepare."""
        return self.executor.warm_up()

    def check(self) -> None:
        """Check the books; clients call this when the engine has gone idle. Raises AssertionError."""
        self.scheduler.check()

    def close(self) -> None:
        self._in_flight.clear()
        self.executor.close()
        self.grammar.close()
