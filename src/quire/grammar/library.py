"""`LibraryGrammar`, the implementation of the grammar seam (core/grammar_interface.py) with llguidance.

There is one `GrammarAnswer` per request, found by request id; its slot only says where its row currently is.
Preemption, chunks and overlap replay nothing, because an answer knows the tokens that its request was given, and
`planned` counts the samples in flight.

The step loop waits for masks up to a limit. A row whose mask is late leaves the step and returns when its mask is
ready. Slow answers are not scheduled before their mask is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from quire.core.grammar_interface import GrammarOutcome, GrammarPause
from quire.grammar.answer import NO_TOKEN_LEFT, GrammarAnswer
from quire.grammar.compiler import CheckedGrammar, Compiler
from quire.grammar.mask_threads import MaskThreads
from quire.types import (
    EngineOutput,
    EngineRequest,
    OutputPart,
    QuireError,
    RequestFailure,
    StepPlan,
    TokenMasks,
    one_by_one,
)

_WAIT_S = 0.002  # longest delay of a message to an engine without other work
_PATIENCE_S = 0.030  # longest wait of a step for its masks
_MATCHERS_BYTES = 1 << 30  # memory for the matchers of all running answers
_BROKEN = "structured_outputs: the answer cannot continue: {}"


class LibraryGrammar:
    """A `Grammar` that compiles specs with a `Compiler` and computes masks in `MaskThreads`.

    Args:
        compiler: compiles specs.
        vocab_size: number of token ids of the model.
        patience_s: longest wait of a step for its masks, in seconds.
    """

    def __init__(self, compiler: Compiler, vocab_size: int, patience_s: float = _PATIENCE_S) -> None:
        self._compiler, self._vocab_size = compiler, vocab_size
        self._threads = MaskThreads(compiler.wakeup, patience_s)
        # Requests whose spec is being compiled, or that wait for memory.
        self._requests: dict[str, tuple[EngineRequest, Future[CheckedGrammar]]] = {}
        self._answers: dict[str, GrammarAnswer] = {}
        self._by_slot: dict[int, GrammarAnswer] = {}
        self._settled: list[GrammarOutcome] = []
        self._paused: list[GrammarPause] = []
        self._rows: list[tuple[int, GrammarAnswer]] = []  # constrained rows of the last plan

    @property
    def started(self) -> bool:
        """Return True once a request has needed a grammar, so that threads and the helper process run."""
        return self._compiler.started

    @property
    def num_answers(self) -> int:
        """Return the number of requests that have a matcher."""
        return len(self._answers)

    @property
    def idle(self) -> bool:
        """Return True if no request waits for a grammar or has one."""
        return not (self._answers or self._requests or self._by_slot)

    # -------------------------------------------------------------------------- requests in and out

    def start(self, request: EngineRequest) -> None:
        assert request.grammar is not None
        self._requests[request.id] = request, self._compiler.submit(request.grammar, request.client)

    def paused(self) -> list[GrammarPause]:
        paused, self._paused = self._paused, []
        return paused

    def settled(self) -> list[GrammarOutcome]:
        if self._requests:
            self._begin_answers()
        for job in self._threads.finished():
            assert isinstance(job, GrammarAnswer)
            job.busy, job.drafts, job.ahead = False, [], []  # the row that had drafts has left its step
            if job.late:
                job.mark_slow()
            if self._answers.get(job.request_id) is job:
                if job.error is None:
                    self._settled.append(GrammarOutcome(job.request_id, None, not job.slow))
                else:
                    self._fail(job, job.error)
        settled, self._settled = self._settled, []
        return settled

    def _begin_answers(self) -> None:
        """Start the answers whose specs are compiled, while there is memory for another matcher."""
        used = sum(answer.memory_bytes for answer in self._answers.values())
        for request, future in list(self._requests.values()):
            if not future.done():
                continue
            try:
                grammar = future.result()
            except QuireError as error:
                self._refuse(request, str(error))
                continue
            except Exception as error:
                self._refuse(request, f"structured_outputs: {type(error).__name__}: {error}")
                continue
            if not used or used + grammar.memory_bytes <= _MATCHERS_BYTES:
                used += grammar.memory_bytes
                self._begin(request, grammar)

    def _refuse(self, request: EngineRequest, error: str) -> None:
        del self._requests[request.id]
        self._settled.append(GrammarOutcome(request.id, error))

    def _begin(self, request: EngineRequest, grammar: CheckedGrammar) -> None:
        del self._requests[request.id]
        answer = self._answers[request.id] = GrammarAnswer(request, grammar, self._vocab_size)
        self._submit(answer)

    def _submit(self, answer: GrammarAnswer) -> None:
        answer.busy, answer.drafts = True, []
        self._threads.submit(answer)

    def wait(self) -> None:
        if self._requests or self._answers:
            self._compiler.wait(_WAIT_S)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        answer = self._answers.pop(request_id, None)
        if answer is not None and self._by_slot.get(answer.slot) is answer:
            del self._by_slot[answer.slot]

    def close(self) -> None:
        self._threads.close()
        self._compiler.close()

    # --------------------------------------------------------------------------------------- steps

    def needs_tokens(self, plan: StepPlan) -> bool:
        if not self._answers:
            return False
        for admit in plan.admissions:
            self._seat(admit.slot, self._answers.get(admit.request.id))
        self._rows = [
            (row, answer)
            for row, (slot, samples) in enumerate(zip(plan.slots.tolist(), plan.samples.tolist()))
            if samples and (answer := self._by_slot.get(slot)) is not None
        ]
        in_flight = any(answer.planned for _, answer in self._rows)
        for _, answer in self._rows:
            answer.planned += 1
        return in_flight

    def _seat(self, slot: int, answer: GrammarAnswer | None) -> None:
        """Note the slot of a request, which changes after a preemption."""
        self._by_slot.pop(slot, None)
        if answer is not None:
            if self._by_slot.get(answer.slot) is answer:
                del self._by_slot[answer.slot]
            answer.slot = slot
            self._by_slot[slot] = answer

    def masks(self, plan: StepPlan, drafts: Callable[[], np.ndarray]) -> TokenMasks | None:
        rows, self._rows = self._rows, []
        if not rows:
            return None
        rows = [(row, answer) for row, answer in rows if answer.request_id in self._answers]
        if plan.max_drafts:
            self._set_drafts(plan, rows, drafts)
        counts = plan.num_drafts.tolist()
        dropped = self._compute([answer for row, answer in rows if answer.ready is None or counts[row]])
        first = plan.first_logit_rows.tolist()
        found = [
            (first[row] + offset, mask)
            for row, answer in rows
            if answer.ready is not None and answer not in dropped
            for offset, mask in enumerate(answer.use())
        ]
        if not found:
            return None  # the scheduler drops the tokens of rows without a mask
        masks = np.stack([mask for _, mask in found]).view(np.int32)
        return TokenMasks(np.array([row for row, _ in found], np.int64), masks)

    def _set_drafts(
        self, plan: StepPlan, rows: list[tuple[int, GrammarAnswer]], drafts: Callable[[], np.ndarray]
    ) -> None:
        """Tell the answers which draft tokens their rows verify."""
        counts = plan.num_drafts.tolist()
        tokens = drafts().tolist() if any(counts[row] for row, _ in rows) else []
        for row, answer in rows:
            if not answer.busy:
                answer.drafts = tokens[row][: counts[row]] if tokens else []

    def _compute(self, answers: list[GrammarAnswer]) -> list[GrammarAnswer]:
        """Compute masks within the step's patience. Fail answers without an allowed token and pause late ones.

        Returns:
            The answers whose rows leave the step.
        """
        idle = [answer for answer in answers if not answer.busy]
        late = set(self._threads.run(idle)) if idle else set[GrammarAnswer]()
        dropped: list[GrammarAnswer] = []
        for answer in answers:
            if answer.busy or answer in late:
                answer.busy = answer.late = True
                dropped.append(answer)
            elif answer.error is not None:
                self._fail(answer, answer.error)
            elif answer.ahead is None:
                dropped.append(answer)
                self._submit(answer)
        for answer in dropped:
            answer.planned -= 1
            self._paused.append(GrammarPause(answer.request_id, True))
        return dropped

    def advance(self, outputs: list[OutputPart]) -> None:
        if not self._answers:
            return
        each = list(one_by_one(outputs))
        outputs[:] = each  # some are changed below
        for output in each:
            answer = self._answers.get(output.id)
            if answer is None:
                continue
            if output.token_ids:
                answer.planned -= 1
                self._append(answer, output)
            if output.finish_reason is not None:
                self.forget(output.id)

    def _append(self, answer: GrammarAnswer, output: EngineOutput) -> None:
        if not answer.accepts(output):
            output.token_ids = []
            output.logprobs = None
            if output.finish_reason is None:
                self._fail(answer, NO_TOKEN_LEFT)
            else:
                failure = RequestFailure(_BROKEN.format(NO_TOKEN_LEFT), param="structured_outputs")
                output.finish_reason, output.error = "error", failure
        elif answer.slow and output.finish_reason is None:
            self._paused.append(GrammarPause(answer.request_id, False))
            self._submit(answer)

    def _fail(self, answer: GrammarAnswer, reason: str) -> None:
        self._settled.append(GrammarOutcome(answer.request_id, _BROKEN.format(reason)))
        self.forget(answer.request_id)
