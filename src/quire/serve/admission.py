"""Admission control: limits how many requests wait. Further requests get 503 with a Retry-After header at once.

A client that holds less than its share of the queue is admitted even when the queue is full, so no client can lock
others out by filling it. With several clients, up to twice the limit can therefore wait.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque

from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import ApiError, overloaded
from quire.types import EngineLoad

_WINDOW_S = 10.0
_LONGEST_S = 60.0
_FULL = ("slots", "latency", "blocks")


class Admission:
    """Counters of the requests on their way to the engine and of those that wait there.

    arrive()    a request has arrived; its prompt is being tokenized
    prepared()  its prompt is tokenized
    pass_on()   its engine requests are sent
    report()    the engine reports its load; requests that it has received are no longer on their way
    finished()  its answer is complete
    leave()     it has ended, in any way
    """

    def __init__(
        self, max_waiting: int, max_waiting_tokens: int | None, max_num_seqs: int, total_weight: float = 1.0
    ) -> None:
        """Start with empty counters.

        Args:
            max_waiting: engine requests that may wait.
            max_waiting_tokens: prompt tokens that may wait; None for no limit.
            max_num_seqs: request slots of the engine.
            total_weight: sum of the weights of all clients.
        """
        self._max_waiting, self._max_tokens, self._slots = max_waiting, max_waiting_tokens, max_num_seqs
        self._total_weight = total_weight
        self._open: dict[str, int] = {}  # unfinished choices of each client
        self.load = EngineLoad()
        self._is_full = False  # whether requests wait for others to end
        self.rejections = {
            "max_waiting": 0,
            "max_waiting_tokens": 0,
            "target_ttft": 0,
            "draining": 0,
        }  # HTTP requests, by cause
        self._turned_away: Counter[str] = Counter()  # rejected HTTP requests of each client
        self.draining: str | None = None  # error message for new requests; None: they are admitted
        self._preparing = 0  # choices whose prompt is being tokenized
        self._sent = 0  # engine requests since the start
        # For each sent request: the value of `_sent` after it, its prompt tokens, and those to be computed.
        self._on_the_way: deque[tuple[int, int, int]] = deque()
        self._way_tokens = self._way_uncached = 0
        self._finished = 0
        self._rate = 0.0  # requests finished per second, smoothed
        self._since_s = time.monotonic()

    @property
    def waiting(self) -> int:
        """Return the number of engine requests without a slot, as of the last report."""
        unseen = self._preparing + self._sent - self.load.received
        free = max(0, self._slots - self.load.running - self.load.waiting)
        return self.load.waiting + max(0, unseen - free)

    @property
    def num_open(self) -> int:
        """Return the number of choices that have arrived and not ended."""
        return sum(self._open.values())

    @property
    def waiting_tokens(self) -> int:
        """Return the number of prompt tokens in waiting requests."""
        return self.load.waiting_tokens + (self._way_tokens if self.waiting else 0)

    def arrive(self, client: ApiClient, choices: int) -> None:
        """Reserve room for `choices` engine requests.

        Raises:
            ApiError: 503 if there is no room now, 400 if there can never be.
        """
        if self.draining:
            self._count_rejection(client, "draining")
            raise overloaded(self.draining, 5)
        if choices > self._max_waiting + self._slots:
            raise ApiError(
                400,
                f"the request asks for {choices} choices (prompts times n), but the server holds at most "
                f"{self._max_waiting + self._slots} ({self._slots} running plus max_waiting): send fewer per request",
            )
        full = self.waiting + choices > self._max_waiting + self._idle_slots()
        if full and self._has_its_share(client, choices):
            self._turn_away(
                client,
                "max_waiting",
                f"{self.waiting} requests are waiting already (max_waiting is {self._max_waiting})",
            )
        self._preparing += choices
        self._open[client.name] = self._open.get(client.name, 0) + choices

    def _has_its_share(self, client: ApiClient, choices: int) -> bool:
        share = self._max_waiting * min(1.0, client.weight / self._total_weight)
        return self._open.get(client.name, 0) + choices > share

    def _idle_slots(self) -> int:
        unseen = self._preparing + self._sent - self.load.received
        return max(0, self._slots - self.load.running - self.load.waiting - unseen)

    def pass_on(
        self,
        client: ApiClient,
        choices: int,
        tokens: int,
        uncached: int,
        target_ttft_s: float = math.inf,
    ) -> float | None:
        """Count prepared requests as sent to the engine.

        Args:
            client: owner of the requests.
            choices: their number.
            tokens: their prompt tokens.
            uncached: those of them that are not expected in the prefix cache.
            target_ttft_s: refuse them if their first token is predicted to take longer.

        Returns:
            The predicted time to first token in seconds; None if nothing predicts it.

        Raises:
            ApiError: 503 if their prompt tokens exceed `max_waiting_tokens`, or if they would miss the target. A request
                that would miss it on an idle engine too is admitted, because waiting does not help it.
        """
        limit, alone = self._max_tokens, self._open[client.name] <= choices
        if limit is not None and not alone and self.waiting and self.waiting_tokens + tokens > limit:
            self._turn_away(
                client,
                "max_waiting_tokens",
                f"{self.waiting_tokens} prompt tokens are waiting already (max_waiting_tokens is {limit})",
            )
        rate = self.load.prompt_rate
        forecast_s = self._first_token_s(uncached, rate) if rate else None
        if forecast_s is not None and forecast_s > target_ttft_s >= uncached / rate:
            self._count_rejection(client, "target_ttft")
            raise overloaded(
                f"the first token is predicted to take {forecast_s:.2f} s, but the target is {target_ttft_s:g} s",
                min(_LONGEST_S, forecast_s - target_ttft_s),
            )
        self._sent += choices
        self._on_the_way.append((self._sent, tokens, uncached))
        self._way_tokens += tokens
        self._way_uncached += uncached
        return forecast_s

    def _first_token_s(self, tokens: int, rate: float) -> float:
        """Return the predicted time to first token of a request of which `tokens` prompt tokens are not cached.

        It waits for the prompts in front of it, and, while slots or blocks are short, for as many requests to end.
        """
        ahead = self.load.uncached_tokens + self.load.computing_tokens + self._way_uncached
        wait_s = 0.0
        if self._rate > 0 and (self._is_full or not self._idle_slots()):
            wait_s = (self.waiting + 1) / self._rate
        return max(ahead / rate, wait_s) + tokens / rate

    def prepared(self, choices: int) -> None:
        """Note that tokenization of a request with `choices` choices has ended, successfully or not."""
        self._preparing -= choices

    def leave(self, client: ApiClient, choices: int) -> None:
        """Remove a request that was answered, refused or aborted."""
        self._open[client.name] -= choices
        if not self._open[client.name]:
            del self._open[client.name]

    def report(self, load: EngineLoad, wait_reason: str | None = None) -> None:
        """Store the engine's load and remove the requests it has received from those on their way.

        Args:
            load: the load.
            wait_reason: why the first waiting request waits (core/steplog.py).
        """
        self.load, self._is_full = load, wait_reason in _FULL
        while self._on_the_way and self._on_the_way[0][0] <= load.received:
            _, tokens, uncached = self._on_the_way.popleft()
            self._way_tokens -= tokens
            self._way_uncached -= uncached

    def finished(self, choices: int) -> None:
        """Count completed choices towards the smoothed completion rate, from which Retry-After is computed."""
        self._finished += choices
        passed = time.monotonic() - self._since_s
        if passed > _WINDOW_S / 10:
            share = min(1.0, passed / _WINDOW_S)
            self._rate += share * (self._finished / passed - self._rate)
            self._finished, self._since_s = 0, time.monotonic()

    def rejected_of(self, client: str | None) -> int:
        """Return the number of requests of one client (None: of all) that were rejected since the start."""
        return sum(self.rejections.values()) if client is None else self._turned_away[client]

    def open_of(self, client: str | None) -> int:
        """Return the number of choices of one client (None: of all) that have not ended."""
        return self.num_open if client is None else self._open.get(client, 0)

    def _count_rejection(self, client: ApiClient, cause: str) -> None:
        self.rejections[cause] += 1
        self._turned_away[client.name] += 1

    def _turn_away(self, client: ApiClient, cause: str, message: str) -> None:
        self._count_rejection(client, cause)
        wait_s = self.waiting / self._rate if self._rate > 0 else 1.0
        raise overloaded(message, min(_LONGEST_S, wait_s))
