"""`GrammarAnswer`: the matcher of one running answer, the mask for its next token, and its time budget.

An answer shares nothing with others, because a lexer's states and their limit count over all that share it. One
thread works on it at a time: the step loop hands it to a thread of mask_threads.py and leaves it alone until
that thread is done. The end of a text is the request's business, not the library's:

    grammar may end   other tokens    an end token is allowed
    no                yes             no
    yes               yes             yes, unless ignore_eos, or before min_tokens
    yes               no              yes, and nothing else: the answer is complete
    no                no              (the request fails: other parameters or the vocabulary leave no way on)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire.grammar.compiler import CheckedGrammar
from quire.types import EngineOutput, EngineRequest, QuireError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_LIMIT_S = 0.2  # processor time of one mask, with the token before it
FREE_S = 2.0  # processor time of all masks of an answer ...
PER_TOKEN_S = 0.02  # ... and more for each of its tokens
_SLOW_S = 0.005  # a mask that takes longer makes its answer slow
_CALM_S, _CALM_MASKS = 0.001, 16  # so many masks in a row that take less make it quick again
_REPLAY_TOKENS = 500  # consumed between two masks; the library refills its fuel at a mask
NO_WAY = "no token satisfies the grammar together with the request's other parameters"
_TOO_SLOW = "its grammar is too slow: {} took {:.0f} ms of processor time, at most {:.0f} are allowed"


class GrammarAnswer:
    """One answer under way. `busy` tells that a thread works on it."""

    __slots__ = (
        "_allowed",
        "_calm",
        "_ends",
        "_grammar",
        "_ignores_end",
        "_matcher",
        "_min_tokens",
        "_spent_s",
        "_stops",
        "_taken",
        "_tokens",
        "_vocab_size",
        "busy",
        "error",
        "late",
        "memory_bytes",
        "planned",
        "ready",
        "request_id",
        "slot",
        "slow",
    )

    def __init__(self, request: EngineRequest, grammar: CheckedGrammar, vocab_size: int) -> None:
        self.request_id, self._grammar, self._vocab_size = request.id, grammar, vocab_size
        self.memory_bytes = grammar.memory_bytes
        params = request.params
        self._ignores_end, self._min_tokens = params.ignore_eos, params.min_tokens
        self._ends = [token for token in request.eos_ids or request.stop_ids if 0 <= token < vocab_size]
        self._stops = [token for token in request.stop_ids if 0 <= token < vocab_size]
        self._matcher: LLMatcher | None = None
        self._tokens: list[int] = []  # of the text so far
        self._taken = 0  # how many of them the matcher has consumed
        self._spent_s = 0.0
        self._calm = 0  # quick masks in a row
        self._allowed: np.ndarray | None = None  # the mask of the sample in flight
        self.ready: np.ndarray | None = None  # the next mask, uint32 [ceil(vocab / 32)]
        self.error: str | None = None
        self.slow = True  # its masks are computed in the background; the first includes building the matcher
        self.busy = False
        self.late = False  # a step has waited for it in vain
        self.slot = -1
        self.planned = 0  # samples in flight

    # --------------------------------------------------------------------- called by the step loop

    def use(self) -> np.ndarray:
        """Return the mask that is ready, for a sample that is now in flight."""
        assert self.ready is not None
        self._allowed, self.ready = self.ready, None
        return self._allowed

    def accepts(self, output: EngineOutput) -> bool:
        """Append the tokens of an output. Return False if one of them is not allowed."""
        for token in output.token_ids:
            if token in self._ends or (output.finish_reason == "stop" and token in self._stops):
                return True
            if self._allowed is None or not self._allowed[token >> 5] >> np.uint32(token & 31) & 1:
                return False
            self._tokens.append(token)
            self._allowed = None
        return True

    def wait_no_more(self) -> None:
        """Treat the answer as slow, whatever its masks cost: no further step is to lose its row."""
        self.late, self.slow, self._calm = False, True, 0

    # ------------------------------------------------------------------------- called by any thread

    def work(self) -> None:
        """Take in the tokens since the last mask and compute the next: sets `ready` or `error`."""
        try:
            begin_s = time.thread_time()
            built = self._matcher is None
            if built:
                self._matcher = self._build()
                begin_s = time.thread_time()  # the helper process has limited the time for this
            replayed = self._advance()
            self._spend(time.thread_time() - begin_s, built or replayed)
        except QuireError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _build(self) -> LLMatcher:
        """Build a matcher that has room for the states of the text so far and for as many more as a new one."""
        from quire.grammar.matching import LEXER_STATES

        texts = self._grammar.vocabulary.texts
        length = sum(len(texts[token]) for token in self._tokens)
        self._taken = 0
        return self._grammar.matcher(LEXER_STATES + 2 * length)

    def _advance(self) -> bool:
        """Return True if it took a new matcher, because the old one had used up its states."""
        from quire.grammar.matching import TOO_MANY_STATES

        bits = self._next_mask()
        assert self._matcher is not None
        replays = bits is None and TOO_MANY_STATES in self._matcher.get_error() and self._taken > 0
        if replays:
            self._matcher = None  # frees its memory before another is built
            self._matcher = self._build()
            bits = self._next_mask()
        if bits is None:
            self.error = self._matcher.get_error().split("\n", 1)[0] or NO_WAY
        else:
            self._edit(bits)
        return replays

    def _next_mask(self) -> np.ndarray | None:
        """Return the library's mask after the text so far, uint32 [ceil((vocab + 1) / 32)], or None on an error."""
        matcher = self._matcher
        assert matcher is not None
        bits = np.zeros(self._vocab_size // 32 + 1, np.uint32)
        while True:
            batch = self._tokens[self._taken : self._taken + _REPLAY_TOKENS]
            for token in batch:
                if not self._consume(matcher, token):
                    return None
            self._taken += len(batch)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if matcher.is_error():
                return None
            if self._taken == len(self._tokens):
                return bits

    def _consume(self, matcher: LLMatcher, token: int) -> bool:
        if not self.slow:
            return matcher.consume_token(token)
        return self._grammar.vocabulary.detached.consume(matcher, token)

    def _edit(self, bits: np.ndarray) -> None:
        """Replace the library's end token by the request's own."""
        word, bit = divmod(self._vocab_size, 32)
        may_end = bool(bits[word] >> np.uint32(bit) & 1)
        bits[word] &= _all_but(bit)
        for token in self._ends:
            bits[token >> 5] &= _all_but(token & 31)
        early = len(self._tokens) < self._min_tokens
        if early:
            kept = bits.copy()
            for token in self._stops:
                bits[token >> 5] &= _all_but(token & 31)
            if not bits.any():
                bits[:] = kept
        if may_end and not ((self._ignores_end or early) and bits.any()):
            for token in self._ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        if bits.any():
            self.ready = bits[: -(-self._vocab_size // 32)]
        else:
            self.error = NO_WAY

    def _spend(self, took_s: float, exceptional: bool) -> None:
        """Charge a mask to the budget and tell slow answers from quick ones.

        Args:
            took_s: processor time.
            exceptional: the matcher was new, so that the mask counts towards the sum alone.
        """
        self._spent_s += took_s
        budget_s = FREE_S + PER_TOKEN_S * len(self._tokens)
        if not exceptional and took_s > MASK_LIMIT_S:
            self.error = _TOO_SLOW.format("one mask", took_s * 1e3, MASK_LIMIT_S * 1e3)
        elif self._spent_s > budget_s:
            what = f"{len(self._tokens)} tokens"
            self.error = _TOO_SLOW.format(what, self._spent_s * 1e3, budget_s * 1e3)
        self._calm = self._calm + 1 if took_s < _CALM_S else 0
        if exceptional:
            self.slow = took_s > _SLOW_S
        elif took_s > _SLOW_S:
            self.slow = True
        elif self._calm >= _CALM_MASKS:
            self.slow = False


def _all_but(bit: int) -> np.uint32:
    return np.uint32(0xFFFFFFFF ^ (1 << bit))
