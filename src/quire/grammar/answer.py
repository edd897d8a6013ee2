"""`GrammarAnswer`: the matcher of one running answer, the mask for its next token, and its time budget.

Answers share no matcher state, because all users of a lexer share its states and their limit. Only one thread works on
an answer at a time: the step loop hands it to a thread of mask_threads.py and does not touch it until that thread is
done. The request, not the library, decides when a text ends:

    grammar may end   other tokens    an end token is allowed
    no                yes             no
    yes               yes             yes, unless ignore_eos, or before min_tokens
    yes               no              yes, and nothing else: the answer is complete
    no                no              (the request fails: no token is left)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from quire.grammar.compiler import CheckedGrammar
from quire.types import EngineOutput, EngineRequest, QuireError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_LIMIT_S = 0.2  # processor time of one mask, including the consumption of the token before it
FREE_S = 2.0  # processor time of all masks of an answer: this much ...
PER_TOKEN_S = 0.02  # ... plus this much per token
_SLOW_S = 0.005  # a mask that takes longer makes its answer slow
_QUICK_S, _QUICK_MASKS = 0.001, 16  # this many masks in a row below _QUICK_S make it quick again
_REPLAY_TOKENS = 500  # consumed between two masks, because the library refills its fuel at each mask
NO_TOKEN_LEFT = (
    "no token satisfies the grammar together with the request's other parameters; check allowed_token_ids, bad_words "
    "and min_tokens"
)
_TOO_SLOW = "its grammar is too slow: {} took {:.0f} ms of processor time, at most {:.0f} are allowed"


class GrammarAnswer:
    """The grammar state of one running request.

    Args:
        request: the engine request.
        grammar: its compiled grammar.
        vocab_size: number of token ids of the model.

    Attributes:
        tokens: the tokens of the text so far.
        ready: the mask for the next token, uint32 [ceil(vocab_size / 32)], or None while there is none. Bit i % 32 of
            word i // 32 is set if token i is allowed.
        drafts: the draft tokens behind the text, for which `work` computes masks as well.
        ahead: the mask behind each draft token that the grammar allows, like `ready`; None if the matcher failed
            there, which says nothing about the text.
        error: why the answer cannot continue, or None.
        busy: True while a thread works on it.
        slow: True if its masks are computed in the background and not within a step.
        late: True if a step has waited for its mask in vain.
        slot: its request slot, -1 if it has none.
        planned: number of samples in flight.
        memory_bytes: memory of its matcher, as measured by the helper process.
    """

    __slots__ = (
        "_ahead_buffers",
        "_allowed",
        "_buffers",
        "_consumed",
        "_ends",
        "_grammar",
        "_ignores_end",
        "_matcher",
        "_min_tokens",
        "_quick_masks",
        "_spent_s",
        "_stops",
        "_vocab_size",
        "ahead",
        "busy",
        "drafts",
        "error",
        "late",
        "memory_bytes",
        "planned",
        "ready",
        "request_id",
        "slot",
        "slow",
        "tokens",
    )

    def __init__(self, request: EngineRequest, grammar: CheckedGrammar, vocab_size: int) -> None:
        self.request_id, self._grammar, self._vocab_size = request.id, grammar, vocab_size
        self.memory_bytes = grammar.memory_bytes
        params = request.params
        self._ignores_end, self._min_tokens = params.ignore_eos, params.min_tokens
        self._ends = [token for token in request.eos_ids or request.stop_ids if 0 <= token < vocab_size]
        self._stops = [token for token in request.stop_ids if 0 <= token < vocab_size]
        # In turns: one is read by the sample in flight while the next mask is computed into the other.
        self._buffers = [_MaskBuffer(vocab_size) for _ in range(2)]
        self._matcher: LLMatcher | None = None
        self.tokens: list[int] = []
        self._consumed = 0  # number of tokens that the matcher has consumed
        self._spent_s = 0.0
        self._quick_masks = 0  # in a row
        self._allowed: list[np.ndarray] = []  # the masks of the sample in flight
        self.ready: np.ndarray | None = None
        self.drafts: list[int] = []
        self.ahead: list[np.ndarray] | None = []
        self._ahead_buffers: list[_MaskBuffer] = []  # by draft token
        self.error: str | None = None
        self.slow = True  # at first, because the first mask includes building the matcher
        self.busy = False
        self.late = False
        self.slot = -1
        self.planned = 0

    # --------------------------------------------------------------------- called by the step loop

    def use(self) -> list[np.ndarray]:
        """Return the masks that are ready, for a sample that is launched now: of the next token and behind drafts."""
        assert self.ready is not None and self.ahead is not None
        self._allowed = [self.ready, *self.ahead]
        self.ready, self.ahead, self.drafts = None, [], []
        return self._allowed

    def accepts(self, output: EngineOutput) -> bool:
        """Append the tokens of an output. Return False if one of them is not allowed by its mask."""
        masks, self._allowed = self._allowed, []
        for index, token in enumerate(output.token_ids):
            if token in self._ends or (output.finish_reason == "stop" and token in self._stops):
                return True
            if index >= len(masks) or not _is_set(masks[index], token):
                return False
            self.tokens.append(token)
        return True

    def mark_slow(self) -> None:
        """Treat the answer as slow, so that no further step loses its row."""
        self.late, self.slow, self._quick_masks = False, True, 0

    # ------------------------------------------------------------------------- called by any thread

    def work(self) -> None:
        """Consume the tokens since the last mask and compute the next one, and those behind draft tokens.

        Sets `ready` and `ahead`, or `error`.
        """
        try:
            begin_s = time.thread_time()
            built = self._matcher is None
            if built:
                self._matcher = self._build()
                begin_s = (
                    time.thread_time()
                )  # building is not charged: the helper process has limited its time
            replayed = self.ready is None and self._advance()
            if self.drafts and self.error is None:
                self._look_ahead()
            masks = 1 + len(self.ahead or ())
            self._charge((time.thread_time() - begin_s) / masks, built or replayed)
        except QuireError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _build(self) -> LLMatcher:
        """Build a matcher with room for the lexer states of the text so far and for as many more as a new one has."""
        from quire.grammar.matching import LEXER_STATES

        texts = self._grammar.vocabulary.texts
        length = sum(len(texts[token]) for token in self.tokens)
        self._consumed = 0
        return self._grammar.matcher(LEXER_STATES + 2 * length)

    def _advance(self) -> bool:
        """Compute the next mask. Return True if that took a new matcher, because the old one had no states left."""
        from quire.grammar.matching import TOO_MANY_STATES

        self._buffers.reverse()
        buffer = self._buffers[0]
        done = self._next_mask(buffer)
        assert self._matcher is not None
        replays = not done and TOO_MANY_STATES in self._matcher.get_error() and self._consumed > 0
        if replays:
            self._matcher = None  # frees its memory before the next one is built
            self._matcher = self._build()
            done = self._next_mask(buffer)
        if done:
            self.ready = self._apply_end_rules(buffer.bits, len(self.tokens))
            if not np.count_nonzero(self.ready):  # twice as fast as any()
                self.ready, self.error = None, NO_TOKEN_LEFT
        else:
            self.error = self._matcher.get_error().split("\n", 1)[0] or NO_TOKEN_LEFT
        return replays

    def _next_mask(self, buffer: _MaskBuffer) -> bool:
        """Write the library's mask after the text so far into `buffer`. Return False on an error."""
        matcher = self._matcher
        assert matcher is not None
        while True:
            batch = self.tokens[self._consumed : self._consumed + _REPLAY_TOKENS]
            for token in batch:
                if not self._consume(matcher, token):
                    return False
            self._consumed += len(batch)
            matcher.unsafe_compute_mask_ptr(buffer.address, buffer.bits.nbytes)
            if matcher.is_error():
                return False
            if self._consumed == len(self.tokens):
                return True

    def _consume(self, matcher: LLMatcher, token: int) -> bool:
        if not self.slow:
            return matcher.consume_token(token)
        return self._grammar.vocabulary.detached.consume(matcher, token)

    def _look_ahead(self) -> None:
        """Compute the masks behind the draft tokens, up to the first one that the grammar or an end rejects."""
        matcher, allowed = self._matcher, self.ready
        assert matcher is not None and allowed is not None
        found: list[np.ndarray] = []
        for token in self.drafts:
            if token in self._ends or token in self._stops or not _is_set(allowed, token):
                break  # no token behind it can be output
            if len(self._ahead_buffers) == len(found):
                self._ahead_buffers.append(_MaskBuffer(self._vocab_size))
            buffer = self._ahead_buffers[len(found)]
            if matcher.consume_token(token):
                matcher.unsafe_compute_mask_ptr(buffer.address, buffer.bits.nbytes)
            if matcher.is_error():
                self._matcher = self.ready = self.ahead = None
                return
            allowed = self._apply_end_rules(buffer.bits, len(self.tokens) + len(found) + 1)
            found.append(allowed)
        matcher.rollback(len(found))
        self.ahead = found

    def _apply_end_rules(self, bits: np.ndarray, length: int) -> np.ndarray:
        """Replace the library's end token in a mask behind `length` tokens by those of the request. Return the mask."""
        may_end = _is_set(bits, self._vocab_size)
        _clear(bits, self._vocab_size)
        for token in self._ends:
            _clear(bits, token)
        early = length < self._min_tokens
        if early:
            kept = bits.copy()
            for token in self._stops:
                _clear(bits, token)
            if not bits.any():
                bits[:] = kept
        if may_end and not ((self._ignores_end or early) and bits.any()):
            for token in self._ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
        return bits[: -(-self._vocab_size // 32)]

    def _charge(self, took_s: float, exceptional: bool) -> None:
        """Charge a mask to the time budget and decide whether the answer is slow.

        Args:
            took_s: processor time.
            exceptional: the matcher was new, so the mask counts towards the total but not as a single mask.
        """
        self._spent_s += took_s
        budget_s = FREE_S + PER_TOKEN_S * len(self.tokens)
        if not exceptional and took_s > MASK_LIMIT_S:
            self.error = _TOO_SLOW.format("one mask", took_s * 1e3, MASK_LIMIT_S * 1e3)
        elif self._spent_s > budget_s:
            self.error = _TOO_SLOW.format(f"{len(self.tokens)} tokens", self._spent_s * 1e3, budget_s * 1e3)
        self._quick_masks = self._quick_masks + 1 if took_s < _QUICK_S else 0
        if exceptional:
            self.slow = took_s > _SLOW_S
        elif took_s > _SLOW_S:
            self.slow = True
        elif self._quick_masks >= _QUICK_MASKS:
            self.slow = False


class _MaskBuffer:
    """A mask of the library, uint32 [ceil((vocab + 1) / 32)], and its address, which takes numpy a microsecond."""

    __slots__ = ("address", "bits")

    def __init__(self, vocab_size: int) -> None:
        self.bits = np.zeros(vocab_size // 32 + 1, np.uint32)
        self.address = self.bits.ctypes.data


# Python's integers are several times as fast here as numpy's scalars.


def _is_set(bits: np.ndarray, token: int) -> bool:
    return bool(bits.item(token >> 5) >> (token & 31) & 1)


def _clear(bits: np.ndarray, token: int) -> None:
    bits[token >> 5] = bits.item(token >> 5) & ~(1 << (token & 31))
