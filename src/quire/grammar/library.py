"""`LibraryGrammar`: which answers are under way, where their rows are, and the masks of a step.

One `GrammarAnswer` per request, found by its id; a slot is only where its row is at present. Nothing is replayed on
preemption, chunks or overlap: an answer knows the tokens that its request was handed, and `planned` counts the
samples still in flight.

The step loop waits for masks up to a limit. A row whose mask is late is taken out of the step and comes back
when the mask is there. Answers known to be slow are not scheduled before their mask is ready.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from quire.core.grammar import Paused, Settled
from quire.grammar.answer import NO_WAY, GrammarAnswer
from quire.grammar.compiler import CheckedGrammar, Compiler
from quire.grammar.mask_threads import MaskThreads
from quire.types import EngineOutput, EngineRequest, QuireError, RequestFailure, StepPlan, TokenMasks

_WAIT_S = 0.002  # as long as a message to an engine without work may lie
_PATIENCE_S = 0.030  # longest wait of a step for its masks
_MATCHERS_BYTES = 1 << 30  # for the grammars of all answers under way
_BROKEN = "structured_outputs: the answer cannot go on: {}"


class LibraryGrammar:
    def __init__(self, compiler: Compiler, vocab_size: int, patience_s: float = _PATIENCE_S) -> None:
        """Args:
        compiler: checks grammars.
        vocab_size: number of token ids of the model.
        patience_s: longest wait of a step for its masks.
        """
        self._compiler, self._vocab_size = compiler, vocab_size
        self._threads = MaskThreads(compiler.wakeup, patience_s)
        # Requests whose grammar is being checked, or that wait for memory.
        self._requests: dict[str, tuple[EngineRequest, Future[CheckedGrammar]]] = {}
        self._answers: dict[str, GrammarAnswer] = {}
        self._by_slot: dict[int, GrammarAnswer] = {}
        self._settled: list[Settled] = []
        self._paused: list[Paused] = []
        self._rows: list[tuple[int, GrammarAnswer]] = []  # of the plan that `needs_tokens` saw last

    # -------------------------------------------------------------------------- requests in and out

    def start(self, request: EngineRequest) -> None:
        assert request.grammar is not None
        self._requests[request.id] = request, self._compiler.submit(request.grammar, request.client)

    def paused(self) -> list[Paused]:
        paused, self._paused = self._paused, []
        return paused

    def settled(self) -> list[Settled]:
        if self._requests:
            self._begin_answers()
        for job in self._threads.finished():
            assert isinstance(job, GrammarAnswer)
            job.busy = False
            if job.late:
                job.wait_no_more()
            if self._answers.get(job.request_id) is job:
                if job.error is None:
                    self._settled.append((job.request_id, None))
                else:
                    self._fail(job, job.error)
        settled, self._settled = self._settled, []
        return settled

    def _begin_answers(self) -> None:
        """Begin answers whose grammar is checked, while there is memory for another."""
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
        self._settled.append((request.id, error))

    def _begin(self, request: EngineRequest, grammar: CheckedGrammar) -> None:
        del self._requests[request.id]
        answer = self._answers[request.id] = GrammarAnswer(request, grammar, self._vocab_size)
        self._submit(answer)

    def _submit(self, answer: GrammarAnswer) -> None:
        answer.busy = True
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
        for admit in plan.admits:
            self._seat(admit.slot, self._answers.get(admit.request.id))
        self._rows = [
            (row, answer)
            for row, (slot, samples) in enumerate(zip(plan.slots.tolist(), plan.samples.tolist()))
            if samples and (answer := self._by_slot.get(slot)) is not None
        ]
        behind = any(answer.planned for _, answer in self._rows)
        for _, answer in self._rows:
            answer.planned += 1
        return behind

    def _seat(self, slot: int, answer: GrammarAnswer | None) -> None:
        """Note that a request takes a slot, perhaps again, after a preemption."""
        self._by_slot.pop(slot, None)
        if answer is not None:
            if self._by_slot.get(answer.slot) is answer:
                del self._by_slot[answer.slot]
            answer.slot = slot
            self._by_slot[slot] = answer

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        rows, self._rows = self._rows, []
        rows = [(row, answer) for row, answer in rows if answer.request_id in self._answers]
        self._compute([answer for _, answer in rows if answer.ready is None])
        ready = [(row, answer.use()) for row, answer in rows if answer.ready is not None]
        if not ready:
            return None  # tokens of rows without a mask are dropped
        masks = np.stack([mask for _, mask in ready]).view(np.int32)
        return TokenMasks(np.array([row for row, _ in ready], np.int64), masks)

    def _compute(self, answers: list[GrammarAnswer]) -> None:
        """Compute masks within the step's patience. Fail the answers that have none, pause those that are late."""
        idle = [answer for answer in answers if not answer.busy]
        late = set(self._threads.run(idle)) if idle else set()
        for answer in answers:
            if answer.busy or answer in late:
                answer.busy = answer.late = True
                answer.planned -= 1
                self._paused.append((answer.request_id, True))
            elif answer.error is not None:
                self._fail(answer, answer.error)

    def advance(self, outputs: list[EngineOutput]) -> None:
        if not self._answers:
            return
        for output in outputs:
            answer = self._answers.get(output.id)
            if answer is None:
                continue
            if output.token_ids:
                answer.planned -= 1
                self._take_in(answer, output)
            if output.finish_reason is not None:
                self.forget(output.id)

    def _take_in(self, answer: GrammarAnswer, output: EngineOutput) -> None:
        if not answer.accepts(output):
            output.token_ids = []
            output.logprobs = None
            if output.finish_reason is None:
                self._fail(answer, NO_WAY)
            else:
                output.finish_reason, output.error = "error", RequestFailure(_BROKEN.format(NO_WAY))
        elif answer.slow and output.finish_reason is None:
            self._paused.append((answer.request_id, False))
            self._submit(answer)

    def _fail(self, answer: GrammarAnswer, reason: str) -> None:
        self._settled.append((answer.request_id, _BROKEN.format(reason)))
        self.forget(answer.request_id)
