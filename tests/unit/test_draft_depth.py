"""The choice of how many draft tokens to verify: a pure function of acceptance and price, and its adaptation."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest

from quire.core.draft_depth import AdaptiveDepth, DraftAccount, batch_depth, best_depth
from quire.core.steplog import StepRecord
from quire.types import EngineRequest, Request, RequestOrder, SamplingParams


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("price", [0.001, 0.01, 0.1, 0.35, 0.75, 1.5])
def test_the_depth_is_the_last_draft_that_is_worth_its_price(acceptance: float, price: float) -> None:
    depth = best_depth(acceptance, price, 7)
    assert depth == sum(acceptance**j > price for j in range(1, 8))


def test_certain_and_impossible_drafts_have_a_depth() -> None:
    assert best_depth(1.0, 0.5, 5) == 5 and best_depth(1.0, 1.5, 5) == 0
    assert best_depth(0.0, 0.1, 5) == 0 and best_depth(0.9, 0.0, 5) == 5


def test_the_depth_maximises_tokens_per_second() -> None:
    """With a step time linear in tokens, the best depth by search is the one by price at the best rate."""
    base_s, token_s = 0.010, 0.001
    for acceptance in (0.2, 0.5, 0.7, 0.9):

        def rate(depth: int, acceptance: float = acceptance) -> float:
            return sum(acceptance**j for j in range(depth + 1)) / (base_s + token_s * (1 + depth))

        best = max(range(9), key=rate)
        price = rate(best) * token_s
        assert best_depth(acceptance, price, 8) == best


def test_the_depth_of_a_batch_is_the_fastest() -> None:
    free, dear = [0.010] * 6, [0.010 + 0.020 * depth for depth in range(6)]
    jump = [0.003, 0.010, 0.010, 0.010, 0.010, 0.010]  # the first draft costs, further ones do not
    likely, unlikely = np.full(4, 0.8), np.full(4, 0.1)
    assert batch_depth(likely, free) == 5 and batch_depth(likely, dear) == 0
    assert batch_depth(np.full(4, 0.95), jump) == 5 and batch_depth(unlikely, jump) == 0
    assert batch_depth(np.zeros(4), free) == 0, "drafts that are never accepted are not worth their time"


def make_request() -> Request:
    source = EngineRequest("r", [1], SamplingParams())
    return Request(
        "r",
        1,
        array("i", [1]),
        source.params,
        RequestOrder(0, 0.0, 0),
        99,
        frozenset(),
        frozenset(),
        0,
        source,
    )


# Milliseconds of a step by number of rows and depth. H200: Llama-3.1-8B in bfloat16, measured at depth 0, 3 and 5 with
# 1, 8, 32 and 128 rows (benchmarks/results/h200-speculation.json); the others lie between. CPU: a draft model whose
# drafts cost far more than they may gain.
H200_MS = {
    1: [3.77, 4.20, 4.24, 4.27, 4.29, 4.31],
    2: [3.90, 4.30, 4.35, 4.40, 4.45, 4.50],
    8: [4.36, 4.90, 5.00, 5.05, 5.08, 5.12],
    32: [5.11, 5.40, 5.65, 5.86, 6.50, 7.21],
    64: [5.90, 6.90, 8.20, 9.40, 11.0, 12.8],
    128: [6.71, 8.30, 10.6, 14.3, 17.2, 20.2],
    256: [9.60, 16.0, 23.0, 29.0, 35.0, 41.0],
}
# The same with FP8 weights, where two tokens take longer than four.
FP8_MS = {1: [2.70, 4.90, 4.45, 3.99, 4.03, 4.07]}
CPU_MS = {rows: [2 * rows**0.7 + 3 * (d > 0) + 0.9 * rows * d for d in range(6)] for rows in (1, 8, 64)}


class Simulation:
    """Steps of the given durations that draft what a real controller asks for, one step late as with overlap.

    One step in a hundred takes up to four times as long, all others vary by three percent, and the first step of each
    depth takes `capture_ms` longer.
    """

    def __init__(
        self, depth: AdaptiveDepth, times_ms: list[float], rows: int, capture_ms: float = 0.0
    ) -> None:
        self.depth, self.times_ms, self.capture_ms = depth, times_ms, capture_ms
        self.requests = [make_request() for _ in range(rows)]
        for request in self.requests:
            depth.start(request)
        self.drafts, self.seen, self.number = [0] * rows, {0}, 0
        self.rng = random.Random(rows)

    def step(self, accepts: float) -> tuple[int, float, float]:
        """Run a step. Return its tokens, its duration, and that of the same step without drafts."""
        rows, drafts = len(self.requests), self.drafts
        self.drafts = [request.drafts for request in self.requests]
        tokens = rows
        for request, count in zip(self.requests, drafts):
            if count:
                accepted = next((i for i in range(count) if self.rng.random() >= accepts), count)
                tokens += accepted
                request.timing.draft_tokens += count
                self.depth.observe(request, count, accepted)
        noise = self.rng.lognormvariate(0, 0.03)
        if self.rng.random() < 0.01:
            noise *= self.rng.uniform(1.5, 4)
        took_ms = noise * self._usual_ms(sum(drafts) / rows)
        if (level := -(-sum(drafts) // rows)) not in self.seen:
            self.seen.add(level)
            took_ms += self.capture_ms
        record = StepRecord(
            self.number, 0.0, [], [], [], rows, 0, None, 0, drafts=sum(drafts), generated=tokens
        )
        record.took_s = took_ms / 1e3
        self.number += 1
        self.depth.end_step(record, self.requests)
        return tokens, took_ms, noise * self.times_ms[0]

    def _usual_ms(self, average: float) -> float:
        """Return the duration of a step at an average depth. A few drafts cost at least half of one for every row."""
        between = float(np.interp(average, range(len(self.times_ms)), self.times_ms))
        return max(between, (self.times_ms[0] + self.times_ms[1]) / 2) if average else between

    def gain(self, accepts: float, steps: int) -> float:
        """Return the throughput of some steps, relative to that without drafts."""
        results = [self.step(accepts) for _ in range(steps)]
        tokens, took_ms, plain_ms = map(sum, zip(*results))
        return tokens / took_ms * plain_ms / (steps * len(self.requests))


def best_gain(times_ms: list[float], accepts: float) -> float:
    """Return the gain of the best fixed depth."""
    return max(sum(accepts**j for j in range(d + 1)) / t for d, t in enumerate(times_ms)) * times_ms[0]


TABLES = {"h200": H200_MS, "fp8": FP8_MS, "cpu": CPU_MS}
CASES = {f"{name}-{rows}": (table, rows) for name, table in TABLES.items() for rows in table}


@pytest.mark.parametrize(("table", "rows"), CASES.values(), ids=CASES)
def test_adaptive_drafts_are_never_slower_than_none(table: dict[int, list[float]], rows: int) -> None:
    for accepts in (0.0, 0.3, 0.6, 0.8, 0.95):
        steps = max(300, min(1200, 3000 // rows))
        gain = Simulation(AdaptiveDepth(5), table[rows], rows).gain(accepts, steps)
        assert gain >= 0.98, f"acceptance {accepts}: {gain:.3f} of plain decoding"
        if (best := best_gain(table[rows], accepts)) > 1.6:
            assert gain > 0.9 * best, f"acceptance {accepts}: {gain:.2f}, {best:.2f} is possible"


@pytest.mark.parametrize("accepts", [0.0, 0.3])
def test_captured_graphs_are_paid_once(accepts: float) -> None:
    simulation = Simulation(AdaptiveDepth(5), H200_MS[8], 8, capture_ms=25.0)
    simulation.gain(accepts, 500)
    assert simulation.gain(accepts, 2000) >= 0.99


# Two CPU cores, the built-in model in INT8 at batch 1, with `demo-draft` and with `ngram`: a step with drafts takes three
# to nine plain ones, and the first of all another five.
SLOW_MS = {"draft": [4.5, 13.5, 17.0, 20.0, 25.0, 30.0], "ngram": [4.5, 9.0, 12.0, 14.0, 17.0, 20.0]}


@pytest.mark.parametrize("method", SLOW_MS)
@pytest.mark.parametrize("accepts", [0.0, 0.3, 0.6, 0.8])
def test_short_answers_one_by_one_lose_nothing_where_drafts_are_dear(method: str, accepts: float) -> None:
    """What one request has learned holds for the next ones; only the first answer pays for it."""
    depth, gains = AdaptiveDepth(5), list[float]()
    for _ in range(8):
        simulation = Simulation(depth, SLOW_MS[method], 1, capture_ms=0.0 if gains else 20.0)
        gains.append(simulation.gain(accepts, 200))
    assert gains[0] >= 0.93
    assert sum(gains[1:]) / len(gains[1:]) >= 0.98, gains


def test_the_first_drafts_of_one_request_are_one_step() -> None:
    """With overlap, two more would be on their way when its time is known."""
    depth = AdaptiveDepth(5)
    simulation, drafting = Simulation(depth, SLOW_MS["draft"], 1), 0
    for _ in range(40):
        simulation.step(0.0)
        drafting += simulation.drafts[0] > 0
    assert drafting == 1


def test_drafts_that_stop_paying_are_given_up_and_taken_up_again() -> None:
    simulation = Simulation(AdaptiveDepth(5), H200_MS[32], 32)
    assert simulation.gain(0.9, 300) > 2.5
    assert simulation.gain(0.0, 600) >= 0.98
    simulation.gain(0.9, 200)  # a probe finds it
    assert simulation.gain(0.9, 300) > 2.5


def test_a_slow_step_is_no_reason_to_stop_drafting() -> None:
    """Steps that compile or capture take a hundred times as long. They happen at every new depth."""
    simulation = Simulation(AdaptiveDepth(5), H200_MS[8], 8, capture_ms=400.0)
    simulation.gain(0.95, 1500)
    assert simulation.gain(0.95, 300) > 3.5


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_seem_to_take_no_time_do_no_harm(seed: int) -> None:
    """The host may learn of several steps at once; on a GPU every second step seemed to take less than none."""
    rng = random.Random(seed)
    simulation = Simulation(AdaptiveDepth(4), H200_MS[8], 8)
    simulation._usual_ms = lambda average: rng.choice([0.0, 0.0, 1e-9, 5.0])
    for _ in range(300):
        simulation.step(rng.random())
        assert all(0 <= request.drafts <= 4 for request in simulation.requests)


def test_new_requests_draft_although_the_last_ones_did_not() -> None:
    depth = AdaptiveDepth(5)
    Simulation(depth, H200_MS[8], 8).gain(0.0, 300)
    assert Simulation(depth, H200_MS[8], 8).gain(0.9, 300) > 2


def test_an_overdrawn_account_waits_for_a_hundredth_of_the_time() -> None:
    account = DraftAccount()
    account.open(1.0)
    account.settle(3.0, 1.0, 1.0)  # two seconds for nothing
    assert account.overdrawn
    steps = 0
    while account.overdrawn:
        account.settle(1.0, 1.0, 1.0)
        steps += 1
    assert 95 <= steps <= 100
    for _ in range(50):
        account.settle(1.0, 1.0, 4.0)
    account.settle(5.0, 1.0, 1.0)
    assert account.overdrawn, "earlier gains pay for a few steps only"


def test_a_batch_that_does_not_draft_seldom_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision takes as long as the rest of retiring a step; probes come as often as if each step decided."""
    decisions = 0

    def counted(*args: Any) -> int:
        nonlocal decisions
        decisions += 1
        return batch_depth(*args)

    monkeypatch.setattr("quire.core.draft_depth.batch_depth", counted)
    depth = AdaptiveDepth(5)
    simulation = Simulation(depth, CPU_MS[8], rows=8)
    probes = 0
    for _ in range(2000):
        simulation.step(accepts=0.05)
        probes += any(request.drafts for request in simulation.requests)
    assert decisions < 2000 / 6
    assert 3 <= probes <= 30
