"""The choice of how many draft tokens to verify: a pure function of acceptance and price, and its adaptation."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from quire.core.draft_depth import AdaptiveDepth, batch_depth, best_depth
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


def make_request(grammar: object = None) -> Request:
    source = EngineRequest("r", [1], SamplingParams(), grammar=grammar)
    return Request(
        "r", 1, array("i", [1]), source.params, RequestOrder(0, 0), 99, frozenset(), frozenset(), 0, source
    )


def run(depth: AdaptiveDepth, accepts: float, token_s: float, rows: int, jump_s: float = 0.0) -> list[float]:
    """Run 400 steps of 10 ms, `token_s` a token, and `jump_s` if there are drafts. Return tokens per second of each."""
    rng, requests, rates = random.Random(0), [make_request() for _ in range(rows)], []
    for request in requests:
        depth.start(request)
    for number in range(400):
        drafts = [request.drafts for request in requests]
        generated = rows
        for request in requests:
            if request.drafts:
                accepted = 0
                while accepted < request.drafts and rng.random() < accepts:
                    accepted += 1
                generated += accepted
                request.timing.draft_tokens += request.drafts
                depth.observe(request, request.drafts, accepted)
        record = StepRecord(number, 0.0, [], [], [], rows, 0, None, 0)
        record.drafts, record.generated = sum(drafts), generated
        record.took_s = 0.010 + token_s * (rows + sum(drafts)) + jump_s * any(drafts)
        depth.end_step(record, requests)
        rates.append(generated / record.took_s)
    return rates


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("accepts", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(("token_s", "jump_s"), [(1e-5, 0.0), (3e-4, 0.0), (5e-3, 0.0), (1e-5, 0.02)])
def test_adaptive_drafts_are_never_slower_than_none(
    rows: int, accepts: float, token_s: float, jump_s: float
) -> None:
    rates = run(AdaptiveDepth(5), accepts, token_s, rows, jump_s)[50:]
    plain = rows / (0.010 + token_s * rows)
    assert sum(rates) / len(rates) > 0.97 * plain


def test_drafts_that_pay_are_drafted() -> None:
    rates = run(AdaptiveDepth(5), 0.8, 1e-5, 1)[100:]
    assert sum(rates) / len(rates) > 3.6 / 0.010002 / 1.05


def test_a_slow_step_is_no_reason_to_stop_drafting() -> None:
    """Steps that compile or capture take a hundred times as long. They happen at every new depth."""
    depth, slow = AdaptiveDepth(5), set(range(0, 60, 3))
    requests = [make_request() for _ in range(8)]
    for request in requests:
        depth.start(request)
    for number in range(120):
        drafts = sum(request.drafts for request in requests)
        for request in requests:
            if request.drafts:
                request.timing.draft_tokens += request.drafts
                depth.observe(request, request.drafts, request.drafts)
        record = StepRecord(number, 0.0, [], [], [], 8, 0, None, 0)
        record.drafts, record.took_s = drafts, 1.0 if number in slow else 0.010 + 1e-5 * drafts
        depth.end_step(record, requests)
    assert [request.drafts for request in requests] == [5] * 8


def test_new_requests_draft_although_the_last_ones_did_not() -> None:
    depth = AdaptiveDepth(5)
    run(depth, 0.0, 1e-5, 4)
    rates = run(depth, 0.9, 1e-5, 4)[20:]
    assert sum(rates) / len(rates) > 2 * 4 / 0.010


def test_requests_under_a_grammar_draft_nothing() -> None:
    request = make_request(grammar={"json": {}})
    AdaptiveDepth(5).start(request)
    assert request.drafts == 0
