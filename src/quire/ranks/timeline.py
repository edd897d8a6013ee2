"""Time lines of start-ups: when each rank ran which phase, to see what ranks do one after another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Spans = dict[
    str, tuple[float, float]
]  # begin and end by phase, seconds of the wall clock, which all ranks of a host share


class PhaseSpans:
    """The spans of one rank's phases. A phase that runs in parts has one span from its first begin to its last end."""

    def __init__(self) -> None:
        self.spans: Spans = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Note the time that the body takes as a part of `phase`."""
        begin = time.time()
        try:
            yield
        finally:
            self.note(phase, begin, time.time())

    def note(self, phase: str, begin: float, end: float) -> None:
        """Add a part of a phase."""
        first, _ = self.spans.get(phase, (begin, end))
        self.spans[phase] = first, end


def relative_spans(ranks: Sequence[Spans]) -> list[Spans]:
    """Return the begin, after the first one of all ranks, and the duration of each phase, in seconds, by rank."""
    origin = min((begin for spans in ranks for begin, _ in spans.values()), default=0.0)
    return [
        {phase: (round(begin - origin, 3), round(end - begin, 3)) for phase, (begin, end) in spans.items()}
        for spans in ranks
    ]
