"""Time lines of start-ups."""

from __future__ import annotations

import time

from quire.ranks.timeline import PhaseSpans, relative_spans


def test_spans_are_relative_to_the_first_begin_of_all_ranks() -> None:
    first, second = PhaseSpans(), PhaseSpans()
    first.note("import", 100.0, 103.0)
    second.note("import", 101.5, 104.0)
    second.note("load", 104.0, 104.5)
    second.note("load", 106.0, 106.001)  # the second part of the phase
    ranks = relative_spans([first.spans, second.spans])
    assert ranks == [{"import": (0.0, 3.0)}, {"import": (1.5, 2.5), "load": (4.0, 2.001)}]


def test_a_phase_is_measured_also_if_it_fails() -> None:
    times = PhaseSpans()
    begin = time.time()
    try:
        with times.during("load"):
            raise ValueError
    except ValueError:
        pass
    assert begin <= times.spans["load"][0] <= times.spans["load"][1] <= time.time()
