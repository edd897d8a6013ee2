"""Where the time of requests goes: a few clocks that run on with the steps, read when a request changes phase.

Owns the clocks and the timing of each request. Nothing is booked per token or per decoding row; whatever is
between two phases is the difference of two readings, and phases follow each other without gaps:

    arrival --held--> released --waiting--> admitted --computing--> first token --decoding--> end
                                   ^------------------ preempted ------------------|

waits     seconds by the reason for which the first waiting request waited (the log's wait_reason); "step":
          nobody looked yet, for a step had to end first
prompts   seconds of steps in which somebody's prompt was computed; a request that is computing has its share
          of these by tokens, the rest it lost to others
lost      seconds by which such steps were longer than the ones without: what decoding requests lose
"""

from __future__ import annotations

import time
from dataclasses import replace

from quire.core.steplog import StepLog, StepRecord
from quire.types import Request, Timing

_QUEUE = frozenset({"slots", "blocks", "tokens", "batch"})  # what whoever is behind the first waits for, too
_SMOOTHING = 0.25  # how fast the length of a step without prompts follows the newest one


class Clocks:
    def __init__(self, log: StepLog) -> None:
        self.lost_s = 0.0
        self.ended_s = 0.0  # monotonic clock, when the latest step ended
        self.held = 0  # requests that wait for their grammar
        self._log = log
        self._waits_s: dict[str, float] = {}
        self._cause = "step"
        self._until_s = time.monotonic()  # until when `_waits_s` runs
        self._prompt_s = 0.0
        self._plain_s: float | None = None  # length of a step without prompts, smoothed

    # ------------------------------------------------------------------------- what happens to all

    def wait(self, reason: str | None) -> None:
        """A step is scheduled; from here on those that wait do so for `reason`."""
        self._advance(time.monotonic())
        cause = reason if reason in _QUEUE else "step"
        if cause == "blocks" != self._cause:
            self._log.totals.pressure += 1
        self._cause = cause

    def _advance(self, now_s: float) -> None:
        cause, waits_s = self._cause, self._waits_s
        waits_s[cause] = waits_s.get(cause, 0.0) + now_s - self._until_s
        self._until_s = now_s

    def retired(self, step: int, catching_up: list[tuple[Request, int, bool]]) -> set[Request]:
        """A step has ended; those of its requests that have caught up with it. `catching_up`: requests that
        had not before, the tokens of their rows, and whether these are the last."""
        now_s = time.monotonic()
        record = self._log.end(step, now_s, self.ended_s)
        self.ended_s = now_s
        took_s, found = record.took_s, set[Request]()
        if not catching_up:
            plain_s = self._plain_s
            self._plain_s = took_s if plain_s is None else plain_s + _SMOOTHING * (took_s - plain_s)
            return found
        self._prompt_s += took_s
        self.lost_s += self._excess_s(record)
        for request, count, last in catching_up:
            request.own_s += took_s * count / record.prompt_tokens
            if last and request.status != "finished":
                found.add(request)
                self._caught_up(request, now_s)
        return found

    def failed(self, step: int) -> None:
        """A step has ended without results."""
        now_s = time.monotonic()
        self._log.end(step, now_s, self.ended_s)
        self.ended_s = now_s

    def _excess_s(self, record: StepRecord) -> float:
        """How much longer a step took because of the prompts in it."""
        if self._plain_s is None:  # there was none without: by tokens
            return record.took_s * record.prompt_tokens / sum(count for _, _, count in record.rows)
        return max(0.0, record.took_s - self._plain_s)

    # ------------------------------------------------------------------------- what happens to one

    def arrived(self, request: Request) -> None:
        now_s = time.monotonic()
        request.timing = Timing(arrival_s=now_s, until_s=now_s)
        if request.held:
            self.held += 1
            request.timing.phase = "held"
        else:
            self._await(request, now_s)

    def released(self, request: Request) -> None:
        """What it was held for is there."""
        if request.held:
            now_s = time.monotonic()
            self._close_phase(request, now_s)
            request.held = None
            self.held -= 1
            self._await(request, now_s)

    def _await(self, request: Request, now_s: float) -> None:
        self._advance(now_s)
        request.timing.phase = "waiting"
        request.waits_mark_s = self._waits_s.copy()

    def admitted(self, request: Request) -> None:
        """It has a slot: the first time, or after a preemption."""
        now_s, timing = time.monotonic(), request.timing
        self._close_phase(request, now_s)
        if timing.admitted_s is None:
            timing.admitted_s, timing.cached_tokens = now_s, request.computed
        else:
            timing.recomputed_tokens += request.known - request.computed
        timing.phase = "computing"
        request.catching_up, request.prompt_mark_s, request.own_s = True, self._prompt_s, 0.0

    def preempted(self, request: Request) -> None:
        now_s = time.monotonic()
        self._close_phase(request, now_s)
        request.timing.preemptions += 1
        self._await(request, now_s)
        self._log.totals.preemptions += 1

    def _caught_up(self, request: Request, now_s: float) -> None:
        """The token that is next after all it knew has come."""
        timing = request.timing
        if timing.first_token_s is None:
            timing.first_token_s = now_s
        if timing.phase == "computing":  # else it was preempted meanwhile
            self._close_phase(request, now_s)
            timing.phase = "decoding"

    def finished(self, request: Request) -> None:
        if request.held:
            self.held -= 1
        self._close_phase(request, time.monotonic())

    def timing(self, request: Request) -> Timing:
        """Up to now, as a copy."""
        return replace(request.timing, waited_s=dict(request.timing.waited_s))

    def _close_phase(self, request: Request, now_s: float) -> None:
        """Book the phase that ends now."""
        timing = request.timing
        took_s = now_s - timing.until_s
        match timing.phase:
            case "held":
                timing.waited_s[request.held or "grammar"] = took_s
            case "waiting":
                self._close_wait(request, now_s, took_s)
            case "computing":
                own_s = min(request.own_s, took_s)
                lost_s = min(max(0.0, self._prompt_s - request.prompt_mark_s - own_s), took_s - own_s)
                self._book_computing(timing, own_s, lost_s, took_s - own_s - lost_s)
            case "decoding":
                lost_s = min(self.lost_s - timing.lost_mark_s, took_s)
                timing.lost_s += lost_s
                timing.decode_s += took_s - lost_s
        timing.until_s, timing.lost_mark_s = now_s, self.lost_s

    def _close_wait(self, request: Request, now_s: float, took_s: float) -> None:
        timing = request.timing
        if timing.preemptions:
            timing.preempted_s += took_s
            return
        self._advance(now_s)
        before_s = request.waits_mark_s
        for cause, until_now_s in self._waits_s.items():
            if (waited_s := until_now_s - before_s.get(cause, 0.0)) > 0:
                timing.waited_s[cause] = timing.waited_s.get(cause, 0.0) + waited_s

    def _book_computing(self, timing: Timing, own_s: float, lost_s: float, rest_s: float) -> None:
        """`rest_s`: a step that was in flight already had to end first."""
        timing.lost_s += lost_s
        if timing.preemptions:
            timing.recompute_s += own_s
            timing.preempted_s += rest_s
            return
        timing.prefill_s += own_s
        if rest_s > 0:
            timing.waited_s["step"] = timing.waited_s.get("step", 0.0) + rest_s
