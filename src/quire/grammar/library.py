"""`LibraryGrammar`: the matchers of running answers, and the masks that they make for a step.

One state per request, found by its id; a slot is only where its rows are at present. A state has consumed
the tokens that its request was handed, so preemption, chunks and overlap need no replay: `planned` counts
the samples that are still in flight. The end of a text is the request's business, not the library's:

    grammar may end   other tokens    an end token is allowed
    no                yes             no
    yes               yes             yes, unless ignore_eos, or before min_tokens
    yes               no              yes, and nothing else: the answer is complete
    no                no              (the request fails: other parameters or the vocabulary leave no way on)
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from quire.core.grammar import Settled
from quire.grammar.compiler import Compiler
from quire.types import EngineOutput, EngineRequest, QuireError, StepPlan, TokenMasks

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_WAIT_S = 0.002  # as long as a message to an engine without work may lie
_PARALLEL_ROWS = 16  # from which it pays to wake other threads
_BROKEN = "structured_outputs: the answer cannot go on: {}"
_NO_WAY = "no token satisfies the grammar together with the request's other parameters"


class _State:
    """One answer under way."""

    __slots__ = (
        "count",
        "ends",
        "ignores_end",
        "matcher",
        "min_tokens",
        "planned",
        "request_id",
        "slot",
        "stops",
    )

    def __init__(self, request: EngineRequest, matcher: LLMatcher, vocab_size: int) -> None:
        self.request_id, self.matcher = request.id, matcher
        params = request.params
        self.ignores_end, self.min_tokens = params.ignore_eos, params.min_tokens
        self.ends = [token for token in request.eos_ids or request.stop_ids if 0 <= token < vocab_size]
        self.stops = [token for token in request.stop_ids if 0 <= token < vocab_size]
        self.slot = -1
        self.count = 0  # tokens consumed
        self.planned = 0  # samples in flight


class LibraryGrammar:
    def __init__(self, compiler: Compiler, vocab_size: int) -> None:
        self._compiler, self._vocab_size = compiler, vocab_size
        self._words = -(-vocab_size // 32)
        self._waiting: dict[str, tuple[EngineRequest, Future[LLMatcher]]] = {}
        self._states: dict[str, _State] = {}
        self._by_slot: dict[int, _State] = {}
        self._failed: list[Settled] = []
        self._rows: list[tuple[int, _State]] = []  # of the plan that `needs_tokens` saw last
        self._executor: LLExecutor | None = None
        self._threads = min(8, (os.cpu_count() or 1) // 2)  # the rest is for what runs beside it

    # -------------------------------------------------------------------------- requests in and out

    def start(self, request: EngineRequest) -> None:
        assert request.grammar is not None
        self._waiting[request.id] = request, self._compiler.submit(request.grammar, request.client)

    def settled(self) -> list[Settled]:
        found, self._failed = self._failed, []
        if self._waiting:
            ready = [name for name, (_, future) in self._waiting.items() if future.done()]
            found += [(name, self._settle(name)) for name in ready]
        return found

    def _settle(self, request_id: str) -> str | None:
        request, future = self._waiting.pop(request_id)
        try:
            self._states[request_id] = _State(request, future.result().deep_copy(), self._vocab_size)
            return None
        except QuireError as error:
            return str(error)
        except Exception as error:
            return f"structured_outputs: {type(error).__name__}: {error}"

    def wait(self) -> None:
        if self._waiting:
            self._compiler.wait(_WAIT_S)

    def forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        state = self._states.pop(request_id, None)
        if state is not None and self._by_slot.get(state.slot) is state:
            del self._by_slot[state.slot]

    def close(self) -> None:
        self._compiler.close()

    # --------------------------------------------------------------------------------------- steps

    def needs_tokens(self, plan: StepPlan) -> bool:
        if not self._states:
            return False
        for admit in plan.admits:
            self._seat(admit.slot, self._states.get(admit.request.id))
        self._rows = [
            (row, state)
            for row, (slot, samples) in enumerate(zip(plan.slots.tolist(), plan.samples.tolist()))
            if samples and (state := self._by_slot.get(slot)) is not None
        ]
        behind = any(state.planned for _, state in self._rows)
        for _, state in self._rows:
            state.planned += 1
        return behind

    def _seat(self, slot: int, state: _State | None) -> None:
        """A request takes a slot, perhaps again, after a preemption."""
        self._by_slot.pop(slot, None)
        if state is not None:
            if self._by_slot.get(state.slot) is state:
                del self._by_slot[state.slot]
            state.slot = slot
            self._by_slot[slot] = state

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        rows, self._rows = self._rows, []
        rows = [(row, state) for row, state in rows if state.request_id in self._states]
        if not rows:
            return None
        bits = self._library_masks([state.matcher for _, state in rows])  # [k, ceil((vocab + 1) / 32)]
        word, bit = divmod(self._vocab_size, 32)
        may_end = bits[:, word] >> bit & 1  # [k], the library's own end token
        for i, (_, state) in enumerate(rows):
            self._edit(state, bits[i], bool(may_end[i]))
        masks = np.ascontiguousarray(bits[:, : self._words]).view(np.int32)
        return TokenMasks(np.array([row for row, _ in rows], np.int64), masks)

    def _library_masks(self, matchers: list[LLMatcher]) -> np.ndarray:
        """uint32 [k, ceil((vocab + 1) / 32)]"""
        bits = np.zeros((len(matchers), self._vocab_size // 32 + 1), np.uint32)
        address, row_bytes = bits.ctypes.data, bits.shape[1] * 4
        if len(matchers) < _PARALLEL_ROWS or self._threads < 2:
            for i, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(address + i * row_bytes, row_bytes)
        else:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._threads)
            tasks = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(tasks, address, row_bytes, len(matchers))
        return bits

    def _edit(self, state: _State, bits: np.ndarray, may_end: bool) -> None:
        """Put the request's own ends in the place of the library's; `bits` is one row, uint32 [words]."""
        word, bit = divmod(self._vocab_size, 32)
        bits[word] &= _all_but(bit)
        for token in state.ends:
            bits[token >> 5] &= _all_but(token & 31)
        early = state.count < state.min_tokens
        if early:
            kept = bits.copy()
            for token in state.stops:
                bits[token >> 5] &= _all_but(token & 31)
            if not bits.any():
                bits[:] = kept
        if may_end and not ((state.ignores_end or early) and bits.any()):
            for token in state.ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        elif not may_end and (state.matcher.is_error() or not bits.any()):
            self._fail(state, state.matcher.get_error().split("\n", 1)[0] or _NO_WAY)
            bits[:] = _ALL  # the row's token is dropped

    def advance(self, outputs: list[EngineOutput]) -> None:
        if not self._states:
            return
        for output in outputs:
            state = self._states.get(output.id)
            if state is None:
                continue
            if output.token_ids:
                state.planned -= 1
                self._consume(state, output)
            if output.finish_reason is not None:
                self.forget(output.id)

    def _consume(self, state: _State, output: EngineOutput) -> None:
        for token in output.token_ids:
            if token in state.ends or (output.finish_reason == "stop" and token in state.stops):
                return
            state.count += 1
            if not state.matcher.consume_token(token):
                output.token_ids = []
                output.logprobs = None
                if output.finish_reason is None:
                    self._fail(state, _NO_WAY)
                else:
                    output.finish_reason, output.error = "error", _BROKEN.format(_NO_WAY)
                return

    def _fail(self, state: _State, reason: str) -> None:
        self._failed.append((state.request_id, _BROKEN.format(reason)))
        self.forget(state.request_id)


_ALL = np.uint32(0xFFFFFFFF)


def _all_but(bit: int) -> np.uint32:
    return np.uint32(0xFFFFFFFF ^ (1 << bit))
