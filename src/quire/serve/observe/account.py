"""Times and counts of engine requests: the single source of /metrics, /stats, receipts and traces.

A track records the times of each open engine request; counters and histograms sum up the finished ones. They change
once per message of the engine process and twice per HTTP request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from quire.frontend.output import RequestState
from quire.serve.observe.histogram import Histogram, one_two_five
from quire.types import EngineOutput, EngineRequest, Figures, SamplingParams, Timing

_TTFT_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_REQUEST_S = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_S = (.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_CAUSES = (
    "step",
    "slots",
    "latency",
    "blocks",
    "tokens",
    "batch",
    "grammar",
    "loading",
    "prefill",
    "transfer",
)


class RequestTrack:
    """The times and counts of one engine request.

    Times are on the monotonic clock; `end_s` is the time of the last token.
    """

    __slots__ = (
        "arrival_s", "end_s", "first_s", "id", "last_s", "params", "prompt_tokens", "sent_s", "timing", "tokens",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, arrival_s: float, sent_s: float) -> None:
        self.id, self.params, self.prompt_tokens = request.id, request.params, len(request.prompt)
        self.arrival_s, self.sent_s = arrival_s, sent_s
        self.first_s: float | None = None
        self.last_s = 0.0
        self.end_s: float | None = None
        self.tokens = 0
        self.timing: Timing | None = None  # from the engine; complete when the request has ended


@dataclass(slots=True)
class ClientTotals:
    """Counters of one client's finished requests."""

    completed: int = 0  # HTTP requests
    aborted: int = 0  # choices
    prompt_tokens: int = 0
    generated_tokens: int = 0


class RequestAccounts:
    """Tracks of the open engine requests, and counters and histograms over all requests since the start."""

    def __init__(self, max_model_len: int) -> None:
        """Start with empty counters; histograms of lengths reach up to `max_model_len` tokens."""
        self.ttft_s, self.itl_s = Histogram(_TTFT_S), Histogram(_TOKEN_S)
        self.e2e_s, self.tpot_s = Histogram(_REQUEST_S), Histogram(_TOKEN_S)
        self.queue_s, self.inference_s = Histogram(_REQUEST_S), Histogram(_REQUEST_S)
        self.prefill_s, self.decode_s = Histogram(_REQUEST_S), Histogram(_REQUEST_S)
        sizes = one_two_five(max_model_len)
        self.prompt_sizes, self.generation_sizes = Histogram(sizes), Histogram(sizes)
        self.longest_sizes, self.max_tokens = Histogram(sizes), Histogram(sizes)
        self.computed_sizes = Histogram(sizes)
        self.choices, self.preemptions = Histogram((1, 2, 5, 10, 20)), Histogram((1, 2, 3, 4, 5, 10, 20))
        self.step_tokens, self.step_s = Histogram(_ITERATION), Histogram(_STEP_S)
        self.step_rows = Histogram(_ITERATION[:-3])
        self.prompt_tokens = self.cached_tokens = self.recomputed_tokens = 0
        self.ended: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.waited_s = dict.fromkeys(_CAUSES, 0.0)  # time in the engine's queue, by cause
        self.lost_s = self.preempted_s = self.recompute_s = 0.0
        self.clients: dict[str, ClientTotals] = {}  # by name
        self._tracks: dict[str, RequestTrack] = {}

    @property
    def open_ids(self) -> list[str]:
        """Return the ids of the engine requests that have not ended in the engine."""
        return list(self._tracks)

    def open(self, requests: Iterable[EngineRequest], arrival_s: float) -> list[RequestTrack]:
        """Create tracks for engine requests that are about to be sent; their HTTP request arrived at `arrival_s`."""
        sent_s = time.monotonic()
        found = [RequestTrack(request, arrival_s, sent_s) for request in requests]
        self._tracks.update((track.id, track) for track in found)
        return found

    def apply(
        self, outputs: Sequence[EngineOutput], figures: Figures, stopped: Iterable[str], now_s: float
    ) -> None:
        """Record a message of the engine.

        Args:
            outputs: new tokens, timings and finish reasons.
            figures: the clocks and the steps since the last message of the engine that sent it.
            stopped: ids of the requests that a stop string has ended with these outputs.
            now_s: time of the message on the monotonic clock.
        """
        for rows, tokens, took_s in figures.steps:
            self.step_rows.observe(rows)
            self.step_tokens.observe(tokens)
            self.step_s.observe(took_s)
        tracks, gap = self._tracks, self.itl_s.observe
        for output in outputs:
            track = tracks.get(output.id)
            if track is None or track.end_s is not None:
                if output.finish_reason is not None:  # the engine confirms an abort
                    tracks.pop(output.id, None)
                continue
            if output.token_ids:
                if track.first_s is None:
                    track.first_s = now_s
                    self.ttft_s.observe(now_s - track.arrival_s)
                else:
                    gap(now_s - track.last_s)
                track.last_s = now_s
                track.tokens += len(output.token_ids)
            if output.timing is not None:
                self._take_timing(track, output.timing)
            if output.finish_reason is not None:
                track.end_s = now_s
                del tracks[output.id]
        for name in stopped:
            if (track := tracks.get(name)) is not None:
                track.end_s = now_s
                if track.timing is not None:
                    track.timing = extend_timing(track.timing, figures)

    def _take_timing(self, track: RequestTrack, timing: Timing) -> None:
        if timing.admitted_s is not None and (track.timing is None or track.timing.admitted_s is None):
            self.prompt_tokens += track.prompt_tokens
            self.cached_tokens += timing.cached_tokens
            self.queue_s.observe(timing.admitted_s - timing.arrival_s)
        track.timing = timing

    def of(self, client: str | None) -> ClientTotals:
        """Return the counters of one client, or (None) their sums over all clients."""
        counters = self.clients.values() if client is None else [self.clients.get(client, ClientTotals())]
        return ClientTotals(*(sum(getattr(one, f.name) for one in counters) for f in fields(ClientTotals)))

    def close(
        self, states: Sequence[RequestState], tracks: Sequence[RequestTrack], client: str, complete: bool
    ) -> None:
        """Record the end of a request.

        Args:
            states: the request's prompts with their answers.
            tracks: one track per answer, in the same order.
            client: name of the client that owns the request.
            complete: whether it ended without an error.
        """
        at = iter(tracks)
        totals = self.clients.setdefault(client, ClientTotals())
        totals.prompt_tokens += sum(track.prompt_tokens for track in tracks if track.timing is not None)
        totals.generated_tokens += sum(track.tokens for track in tracks)
        totals.completed += complete
        for state in states:
            mine = [next(at) for _ in state.answers]
            if all(track.end_s is not None for track in mine):
                self.choices.observe(len(mine))
                self.longest_sizes.observe(max(track.tokens for track in mine))
            for answer, track in zip(state.answers, mine):
                self.ended[answer.finish_reason or "abort"] += 1
                totals.aborted += answer.finish_reason in (None, "abort")
                if track.timing is not None:
                    self._book(track.timing)
                if track.end_s is None:
                    track.end_s = time.monotonic()  # it was aborted
                elif answer.finish_reason in ("stop", "length"):
                    self._observe(track, track.end_s)

    def _book(self, timing: Timing) -> None:
        for cause, seconds in timing.waited_s.items():
            self.waited_s[cause] = self.waited_s.get(cause, 0.0) + seconds
        self.lost_s += timing.lost_s
        self.preempted_s += timing.preempted_s
        self.recompute_s += timing.recompute_s
        self.recomputed_tokens += timing.recomputed_tokens

    def _observe(self, track: RequestTrack, end_s: float) -> None:
        timing, params = track.timing, track.params
        self.e2e_s.observe(end_s - track.arrival_s)
        self.prompt_sizes.observe(track.prompt_tokens)
        self.generation_sizes.observe(track.tokens)
        self._observe_params(params)
        if track.first_s is not None and track.tokens > 1:
            self.tpot_s.observe((track.last_s - track.first_s) / (track.tokens - 1))
        if timing is None or timing.admitted_s is None or timing.first_token_s is None:
            return
        self.inference_s.observe(timing.until_s - timing.admitted_s)
        self.prefill_s.observe(timing.first_token_s - timing.admitted_s)
        self.decode_s.observe(timing.until_s - timing.first_token_s)
        self.computed_sizes.observe(track.prompt_tokens - timing.cached_tokens)
        self.preemptions.observe(timing.preemptions)

    def _observe_params(self, params: SamplingParams) -> None:
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)


def extend_timing(timing: Timing, figures: Figures) -> Timing:
    """Return a copy of `timing` extended by the time from its last update to the latest step."""
    took_s = max(0.0, figures.time_s - timing.until_s)
    found = replace(timing, until_s=timing.until_s + took_s, lost_mark_s=figures.lost_s)
    if timing.phase == "decoding":
        lost_s = min(max(0.0, figures.lost_s - timing.lost_mark_s), took_s)
        found.lost_s += lost_s
        found.decode_s += took_s - lost_s
    else:
        found.preempted_s += took_s
    return found
