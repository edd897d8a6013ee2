"""The time of requests by phase, measured with a few clocks that are read when a request changes phase.

Nothing is counted per token or per decoding row. The duration of a phase is the difference of two readings of a clock,
and phases follow each other without gaps:

    arrival --held--> released --waiting--> admitted --computing--> first token --decoding--> end
                                   ^------------------ preempted ------------------|

clock     seconds of
waits     waiting, by the reason why the first waiting request waits (the log's wait_reason). "step" stands for
          requests that no step has considered yet.
prompts   steps in which a prompt was computed. A computing request is charged its share of them by tokens; the rest
          is time lost to others.
lost      the excess of such steps over steps without prompts, which is the time that decoding requests lose
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from quire.core.steplog import StepLog, StepRecord
from quire.types import DeviceTimes, Request, Timing

# Reasons that also apply to all requests behind the first one.
_QUEUE = frozenset({"slots", "latency", "blocks", "tokens", "batch"})
_SMOOTHING = 0.25  # weight of the newest step in the smoothed duration of steps without prompts


class CatchUpRow(NamedTuple):
    """A row of a request that has not caught up: some of its known tokens are not computed yet."""

    request: Request
    num_tokens: int
    is_last: bool  # the request has caught up with the end of the step


class Clocks:
    """The clocks of an engine. It owns the timing of each request."""

    def __init__(self, log: StepLog) -> None:
        self.lost_s = 0.0
        self.ended_s = 0.0  # monotonic clock, when the results of the latest step were taken
        self._ready_s = 0.0  # the same, when they were there
        self.held = 0  # number of requests that wait for their grammar or for blocks from elsewhere
        self._log = log
        self._waits_s: dict[str, float] = {}
        self._cause = "step"
        self._until_s = log.now()  # point in time up to which `_waits_s` has been advanced
        self._prompt_s = 0.0
        self._plain_s: float | None = None  # smoothed duration of a step without prompts

    # --------------------------------------------------------------------------- events of all requests

    def wait(self, reason: str | None) -> None:
        """Set the reason for which requests wait from now on; called when a step has been scheduled."""
        self._advance(self._log.now())
        cause = reason if reason in _QUEUE else "step"
        if cause == "blocks" != self._cause:
            self._log.totals.pressure += 1
        self._cause = cause

    def _advance(self, now_s: float) -> None:
        cause, waits_s = self._cause, self._waits_s
        waits_s[cause] = waits_s.get(cause, 0.0) + now_s - self._until_s
        self._until_s = now_s

    def end_step(
        self, record: StepRecord, rows: list[CatchUpRow], times: DeviceTimes | None = None
    ) -> set[Request]:
        """Advance the clocks at the end of a step and write its duration into its record.

        Args:
            record: the record of the step.
            rows: the rows of the step whose requests had not caught up.
            times: its times by the clock of the device; None if only the host has one.

        Returns:
            The requests that have caught up with this step.
        """
        now_s = self._log.now()
        self._close_step(record, now_s, times)
        took_s = record.took_s
        found: set[Request] = set()
        if not rows:
            plain_s = self._plain_s
            self._plain_s = took_s if plain_s is None else plain_s + _SMOOTHING * (took_s - plain_s)
            return found
        self._prompt_s += took_s
        self.lost_s += self._excess_s(record)
        for request, count, is_last in rows:
            request.own_s += took_s * count / record.prompt_tokens
            if is_last and not request.ended:
                found.add(request)
                self._catch_up(request, now_s)
        return found

    def fail_step(self, record: StepRecord) -> None:
        """Note the end of a step that brought no results."""
        self._close_step(record, self._log.now())

    def _close_step(self, record: StepRecord, now_s: float, times: DeviceTimes | None = None) -> None:
        # A step that had ended when it was launched may end before the one in front is known to have ended.
        ready_s = max(min(now_s, record.ready_s), self._ready_s)
        if times is None:
            record.took_s = ready_s - max(self._ready_s, record.time_s)
        else:
            # The end of a step is that of the copy of its results, which may still run when a short step behind it ends.
            record.took_s = max(0.0, min(times.since_last_s, record.schedule_s + times.since_start_s))
        self.ended_s, self._ready_s = now_s, ready_s
        self._log.end(record)

    def _excess_s(self, record: StepRecord) -> float:
        """Return the part of a step's duration that its prompts caused."""
        if self._plain_s is None:  # no step without prompts to compare with: estimate by tokens
            return record.took_s * record.prompt_tokens / record.num_tokens
        return max(0.0, record.took_s - self._plain_s)

    # ---------------------------------------------------------------------------- events of one request

    def arrive(self, request: Request) -> None:
        """Start the timing of a new request, which is held or waits."""
        now_s = self._log.now()
        request.timing = Timing(arrival_s=now_s, until_s=now_s)
        if request.held:
            self.held += 1
            request.timing.phase = "held"
        else:
            self._start_wait(request, now_s)

    def hold(self, request: Request, reason: str) -> None:
        """Keep a waiting request from being admitted, and note why."""
        self._close_phase(request, self._log.now())
        request.held, request.timing.phase = reason, "held"
        self.held += 1

    def release(self, request: Request) -> None:
        """Note that a held request begins to wait for a slot. Call before `request.held` is cleared."""
        now_s = self._log.now()
        self._close_phase(request, now_s)
        self.held -= 1
        self._start_wait(request, now_s)

    def _start_wait(self, request: Request, now_s: float) -> None:
        self._advance(now_s)
        request.timing.phase = "waiting"
        request.waits_mark_s = self._waits_s.copy()

    def admit(self, request: Request, prefix_end: str) -> None:
        """Note that a request has taken a slot, for the first time or after a preemption.

        Args:
            request: the request, with `computed` set to the tokens found in the prefix cache.
            prefix_end: why the cache held no more of it (`PrefixCache.end_of_match`).
        """
        now_s, timing = self._log.now(), request.timing
        self._close_phase(request, now_s)
        if timing.admitted_s is None:
            timing.admitted_s, timing.cached_tokens, timing.prefix_end = now_s, request.computed, prefix_end
        else:
            timing.recomputed_tokens += request.known - request.computed
        timing.phase = "computing"
        request.prompt_mark_s, request.own_s = self._prompt_s, 0.0

    def preempt(self, request: Request) -> None:
        """Note that a running request waits again."""
        now_s = self._log.now()
        self._close_phase(request, now_s)
        request.timing.preemptions += 1
        self._start_wait(request, now_s)
        self._log.totals.preemptions += 1

    def _catch_up(self, request: Request, now_s: float) -> None:
        """Note that a request has its first token, or its first one after a preemption."""
        timing = request.timing
        if timing.first_token_s is None:
            timing.first_token_s = now_s
        if timing.phase == "computing":  # else it was preempted while the step was in flight
            self._close_phase(request, now_s)
            timing.phase = "decoding"

    def finish(self, request: Request) -> None:
        """Close the timing of a request that ends."""
        if request.held:
            self.held -= 1
        self._close_phase(request, self._log.now())

    def timing(self, request: Request) -> Timing:
        """Return a copy of the request's timing, which is valid up to its `until_s`."""
        return replace(request.timing, waited_s=dict(request.timing.waited_s))

    def _close_phase(self, request: Request, now_s: float) -> None:
        """Add the time since `until_s` to the durations of the present phase."""
        timing = request.timing
        took_s = now_s - timing.until_s
        match timing.phase:
            case "held" if timing.preemptions:
                timing.preempted_s += took_s
            case "held":
                reason = request.held or "grammar"
                timing.waited_s[reason] = timing.waited_s.get(reason, 0.0) + took_s
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
        """Add a computing phase to `timing`. `rest_s` is the wait for a step that was already in flight."""
        timing.lost_s += lost_s
        if timing.preemptions:
            timing.recompute_s += own_s
            timing.preempted_s += rest_s
            return
        timing.prefill_s += own_s
        if rest_s > 0:
            timing.waited_s["step"] = timing.waited_s.get("step", 0.0) + rest_s
