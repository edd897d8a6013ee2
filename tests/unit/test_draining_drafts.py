"""A batch that drains, with simulated steps: it keeps drafting while its requests end one by one."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from test_draft_depth import H200_MS, make_request

from quire.core.draft_depth import AdaptiveDepth, DraftDepth
from quire.core.steplog import StepRecord
from quire.types import Request

TOKENS, MOST, SEEDS = 128, 5, 6
ROWS = sorted(H200_MS)


def step_ms(rows: int, average: float) -> float:
    """Return the duration of a step of an H200, between the measured ones."""
    by_depth = [float(np.interp(rows, ROWS, [H200_MS[n][d] for n in ROWS])) for d in range(MOST + 1)]
    between = float(np.interp(average, range(MOST + 1), by_depth))
    return max(between, (by_depth[0] + by_depth[1]) / 2) if average else between


class BestDepth:
    """A `DraftDepth` that knows the acceptance and all step times."""

    def __init__(self, accepts: float) -> None:
        self._accepts = accepts

    def start(self, request: Request) -> None:
        request.drafts = 0

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        yields = np.cumsum(self._accepts ** np.arange(MOST + 1.0))
        best = int((yields / [step_ms(len(rows), d) for d in range(MOST + 1)]).argmax())
        for request in rows:
            request.drafts = best


def drain_ms(depth: DraftDepth, rows: int, accepts: float, seed: int) -> float:
    """Return the time until `rows` requests of `TOKENS` tokens have ended, with drafts one step late as with overlap."""
    rng, total_ms = random.Random(seed), 0.0
    left = [TOKENS] * rows
    requests = [make_request() for _ in left]
    for request in requests:
        depth.start(request)
    planned = [0] * rows
    while running := [i for i in range(rows) if left[i] > 0]:
        drafts = {i: min(planned[i], left[i] - 1) for i in running}
        planned = [request.drafts for request in requests]
        generated = 0
        for i, count in drafts.items():
            accepted = next((j for j in range(count) if rng.random() >= accepts), count)
            if count:
                requests[i].timing.draft_tokens += count
                depth.observe(requests[i], count, accepted)
            left[i] -= 1 + accepted
            generated += 1 + accepted
        total = sum(drafts.values())
        took_ms = step_ms(len(running), total / len(running)) * rng.lognormvariate(0, 0.03)
        record = StepRecord(0, 0.0, [], [], [], len(running), 0, None, 0, drafts=total, generated=generated)
        record.took_s = took_ms / 1e3
        depth.end_step(record, [requests[i] for i in running])
        total_ms += took_ms
    return total_ms


@pytest.mark.parametrize(("rows", "share"), [(8, 0.86), (32, 0.88), (128, 0.87)])
def test_a_batch_that_drains_goes_on_drafting(rows: int, share: float) -> None:
    """Learning every smaller batch anew reaches 0.84, 0.81 and 0.84 of the best."""
    best = [drain_ms(BestDepth(0.95), rows, 0.95, seed) for seed in range(SEEDS)]
    adaptive = [drain_ms(AdaptiveDepth(MOST), rows, 0.95, seed) for seed in range(SEEDS)]
    assert statistics.mean(best) > share * statistics.mean(adaptive)


@pytest.mark.parametrize("rows", [8, 32, 128])
@pytest.mark.parametrize("accepts", [0.0, 0.3])
def test_a_batch_that_drains_is_not_slower_than_plain_decoding(rows: int, accepts: float) -> None:
    adaptive = statistics.mean(drain_ms(AdaptiveDepth(MOST), rows, accepts, seed) for seed in range(SEEDS))
    assert TOKENS * step_ms(rows, 0) > 0.97 * adaptive


def test_drafts_that_stop_paying_in_a_smaller_batch_are_given_up() -> None:
    """The times of the larger batch are only the beginning: they do not keep drafts that cost too much."""

    def settle(depth: AdaptiveDepth, rows: list[Request], draft_ms: float) -> int:
        for _ in range(60):
            drafts = [request.drafts for request in rows]
            for request, count in zip(rows, drafts):
                if count:
                    request.timing.draft_tokens += count
                    depth.observe(request, count, count)
            record = StepRecord(
                0,
                0.0,
                [],
                [],
                [],
                len(rows),
                0,
                None,
                0,
                drafts=sum(drafts),
                generated=sum(drafts) + len(rows),
            )
            record.took_s = (5 + draft_ms * max(drafts)) / 1e3
            depth.end_step(record, rows)
        return max(request.drafts for request in rows)

    depth, rows = AdaptiveDepth(MOST), [make_request() for _ in range(16)]
    for request in rows:
        depth.start(request)
    assert settle(depth, rows, 1.0) == MOST
    assert settle(depth, rows[:4], 20.0) <= 1
