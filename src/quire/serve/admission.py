"""How much may wait. Requests beyond it are turned away at once, with the time after which to come again.

When everything is full, a client that has less than its share still gets in: nobody can lock others out by
filling the queue. So at most twice the limit waits, and only with several clients.
"""

from __future__ import annotations

import time
from collections import Counter, deque

from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import ApiError, overloaded
from quire.types import EngineLoad

_WINDOW_S = 10.0
_LONGEST_S = 60.0


class Admission:
    """Counts what is on its way to the engine and what waits there; owns nothing else.

    arrive()    a request came in; its prompt is being tokenised
    pass_on()   its engine requests are sent
    report()    the engine says how busy it is; what it has received is no longer on its way
    """

    def __init__(
        self, max_waiting: int, max_waiting_tokens: int | None, max_num_seqs: int, total_weight: float = 1.0
    ) -> None:
        """`total_weight`: of all clients, together."""
        self._max_waiting, self._max_tokens, self._slots = max_waiting, max_waiting_tokens, max_num_seqs
        self._total_weight = total_weight
        self._open: dict[str, int] = {}  # choices of each client that are not finished
        self.load = EngineLoad()
        self.rejections = {"max_waiting": 0, "max_waiting_tokens": 0, "draining": 0}  # by cause
        self._turned_away: Counter[str] = Counter()  # requests of each client
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
    def num_open(self) -> int:
        """Choices that came in and are not over yet."""
        return sum(self._open.values())

    @property
    def waiting_tokens(self) -> int:
        return self.load.waiting_tokens + (self._way_tokens if self.waiting else 0)

    def arrive(self, client: ApiClient, choices: int) -> None:
        """Make room for `choices` engine requests. Raises ApiError 503 if there is none, 400 if there never is."""
        if self.draining:
            self._count_rejection(client, "draining")
            raise overloaded(self.draining, 5)
        if choices > self._max_waiting + self._slots:
            raise ApiError(
                400,
                f"the request asks for {choices} choices (prompts times n), but the server takes "
                f"{self._max_waiting + self._slots} at once (max_waiting, and {self._slots} running)",
            )
        full = self.waiting + choices > self._max_waiting + self._idle_slots()
        if full and self._has_its_share(client, choices):
            self._turn_away(
                client,
                "max_waiting",
                f"{self.waiting} requests wait already (max_waiting is {self._max_waiting})",
            )
        self._preparing += choices
        self._open[client.name] = self._open.get(client.name, 0) + choices

    def _has_its_share(self, client: ApiClient, choices: int) -> bool:
        share = self._max_waiting * min(1.0, client.weight / self._total_weight)
        return self._open.get(client.name, 0) + choices > share

    def _idle_slots(self) -> int:
        unseen = self._preparing + self._sent - self.load.received
        return max(0, self._slots - self.load.running - self.load.waiting - unseen)

    def pass_on(self, client: ApiClient, choices: int, tokens: int) -> None:
        """Let prepared requests go to the engine, unless their prompt tokens are too many to wait."""
        limit, alone = self._max_tokens, self._open[client.name] <= choices
        if limit is not None and not alone and self.waiting and self.waiting_tokens + tokens > limit:
            self._turn_away(
                client,
                "max_waiting_tokens",
                f"{self.waiting_tokens} prompt tokens wait already (max_waiting_tokens is {limit})",
            )
        self._sent += choices
        self._on_the_way.append((self._sent, tokens))
        self._way_tokens += tokens

    def prepared(self, choices: int) -> None:
        """The prompts are tokenised, or were refused."""
        self._preparing -= choices

    def leave(self, client: ApiClient, choices: int) -> None:
        """The request is answered, refused or given up."""
        self._open[client.name] -= choices
        if not self._open[client.name]:
            del self._open[client.name]

    def report(self, load: EngineLoad) -> None:
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

    def rejected_of(self, client: str | None) -> int:
        """Return the number of requests of one client, or of all, that were turned away since the start."""
        return sum(self.rejections.values()) if client is None else self._turned_away[client]

    def open_of(self, client: str | None) -> int:
        """Return the number of choices of one client, or of all, that are not over yet."""
        return self.num_open if client is None else self._open.get(client, 0)

    def _count_rejection(self, client: ApiClient, cause: str) -> None:
        self.rejections[cause] += 1
        self._turned_away[client.name] += 1

    def _turn_away(self, client: ApiClient, cause: str, message: str) -> None:
        self._count_rejection(client, cause)
        wait_s = self.waiting / self._rate if self._rate > 0 else 1.0
        raise overloaded(message, min(_LONGEST_S, wait_s))
