"""How much may wait. Requests beyond it are turned away at once, with the time after which to come again."""

from __future__ import annotations

import time
from collections import deque

from quire.serve.errors import ApiError, overloaded
from quire.types import Load

_WINDOW_S = 10.0
_LONGEST_S = 60.0


class Admission:
    """Counts what is on its way to the engine and what waits there; owns nothing else.

    arrive()    a request came in; its prompt is being tokenised
    pass_on()   its engine requests are sent
    report()    the engine says how busy it is; what it has received is no longer on its way
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int | None, max_num_seqs: int) -> None:
        self._max_waiting, self._max_tokens, self._slots = max_waiting, max_waiting_tokens, max_num_seqs
        self.load = Load()
        self.rejected = 0
        self.draining: str | None = None  # why nobody is let in any more
        self._preparing = 0  # choices whose prompt is being tokenised
        self._sent = 0  # engine requests since the start
        self._on_the_way: deque[tuple[int, int]] = deque()  # (`_sent` after it, prompt tokens)
        self._way_tokens = 0
        self._finished = 0
        self._rate = 0.0  # requests finished per second, smoothed
        self._since_s = time.monotonic()

    @property
    def waiting(self) -> int:
        """Engine requests without a slot, as far as is known here."""
        unseen = self._preparing + self._sent - self.load.received
        free = max(0, self._slots - self.load.running - self.load.waiting)
        return self.load.waiting + max(0, unseen - free)

    @property
    def waiting_tokens(self) -> int:
        return self.load.waiting_tokens + (self._way_tokens if self.waiting else 0)

    def arrive(self, choices: int) -> None:
        """Make room for `choices` engine requests. Raises ApiError 503 if there is none, 400 if there never is."""
        if self.draining:
            self.rejected += 1
            raise overloaded(self.draining, 5)
        if choices > self._max_waiting + self._slots:
            raise ApiError(
                400,
                f"the request asks for {choices} choices (prompts times n), but the server takes "
                f"{self._max_waiting + self._slots} at once (max_waiting, and {self._slots} running)",
            )
        if self.waiting + choices > self._max_waiting + self._idle_slots():
            self._turn_away(f"{self.waiting} requests wait already (max_waiting is {self._max_waiting})")
        self._preparing += choices

    def _idle_slots(self) -> int:
        unseen = self._preparing + self._sent - self.load.received
        return max(0, self._slots - self.load.running - self.load.waiting - unseen)

    def pass_on(self, choices: int, tokens: int) -> None:
        """Let prepared requests go to the engine, unless their prompt tokens are too many to wait."""
        limit = self._max_tokens
        if limit is not None and self.waiting and self.waiting_tokens + tokens > limit:
            self._turn_away(
                f"{self.waiting_tokens} prompt tokens wait already (max_waiting_tokens is {limit})"
            )
        self._sent += choices
        self._on_the_way.append((self._sent, tokens))
        self._way_tokens += tokens

    def leave(self, choices: int) -> None:
        """The prompt is tokenised, or was refused: the request is no longer being prepared."""
        self._preparing -= choices

    def report(self, load: Load) -> None:
        self.load = load
        while self._on_the_way and self._on_the_way[0][0] <= load.received:
            self._way_tokens -= self._on_the_way.popleft()[1]

    def finished(self, choices: int) -> None:
        self._finished += choices
        passed = time.monotonic() - self._since_s
        if passed > _WINDOW_S / 10:
            share = min(1.0, passed / _WINDOW_S)
            self._rate += share * (self._finished / passed - self._rate)
            self._finished, self._since_s = 0, time.monotonic()

    def _turn_away(self, message: str) -> None:
        self.rejected += 1
        wait_s = self.waiting / self._rate if self._rate > 0 else 1.0
        raise overloaded(message, min(_LONGEST_S, wait_s))
