"""The columns of requests: they agree with plain lists, and a plain decode row costs no Python."""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter

import numpy as np

from quire.core.block_pool import LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy
from quire.core.prefix_cache import HashPrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.steplog import RecordedRows, StepLog
from quire.core.stop_tokens import StopTokens
from quire.types import NO_TOKEN, NOT_FINITE, EngineRequest, Request, RequestOrder, SamplingParams
from quire.types.request_table import KNOWN, UNUSED_ROW, RequestTable
from quire.worker.constant_executor import ConstantExecutor

BLOCK = 64


def make_request(table: RequestTable, prompt: list[int]) -> Request:
    source, none = EngineRequest("r", prompt, SamplingParams()), frozenset[int]()
    order = RequestOrder(0, 0.0, 0)
    return Request(
        "r", len(prompt), array("i", prompt), source.params, order, 999, none, none, 0, source, table
    )


def test_tokens_in_columns_agree_with_lists() -> None:
    for seed in range(20):
        rng, table = random.Random(seed), RequestTable()
        wanted: dict[Request, list[int]] = {}
        for _ in range(150):
            if len(wanted) < 9 and rng.random() < 0.3:
                prompt = [rng.randrange(99) for _ in range(rng.randint(1, 40))]
                wanted[make_request(table, prompt)] = prompt[:]
            requests = rng.sample(list(wanted), rng.randint(0, len(wanted)))
            new = np.array([rng.randrange(99) for _ in requests], np.int32)
            rows = np.array([request.row for request in requests], np.int64)
            table.append(rows, table.data[KNOWN][rows], new)
            for request, token in zip(requests, new.tolist()):
                wanted[request].append(token)
            if wanted and rng.random() < 0.5:
                request = rng.choice(list(wanted))
                request.append(7)
                wanted[request].append(7)
            assert all(request.known == len(tokens) for request, tokens in wanted.items())
            if wanted and rng.random() < 0.2:
                request = rng.choice(list(wanted))
                assert request.tokens.tolist() == wanted[request]
                request.pending = rng.randint(0, 1)
                row, in_flight = request.row, request.pending
                request.end()
                assert request.row == (row if in_flight else UNUSED_ROW), "a step in flight refers to the row"
                request.pending = 0
                request.end()
                assert request.row == UNUSED_ROW and request.tokens.tolist() == wanted.pop(request)
        assert len(table) == len(wanted)
        assert all(request.tokens.tolist() == tokens for request, tokens in wanted.items())


def test_stop_tokens_are_those_of_unfinished_requests() -> None:
    rng, stops, held = random.Random(3), StopTokens(), list[frozenset[int]]()
    for _ in range(200):
        if held and rng.random() < 0.5:
            stops.remove(held.pop(rng.randrange(len(held))))
        else:
            held.append(frozenset(rng.sample(range(12), rng.randint(0, 3))))
            stops.add(held[-1])
        tokens = np.array([NO_TOKEN, NOT_FINITE, *range(14)], np.int32)
        wanted = {NO_TOKEN, NOT_FINITE}.union(*held)
        assert stops.mark(tokens).tolist() == [token in wanted for token in tokens.tolist()]


def test_rows_of_the_log_are_tuples() -> None:
    given = [("a", 5, 1), ("b", 0, 7), ("a", 9, 2)]
    rows = RecordedRows.of(given)
    assert list(rows) == given and len(rows) == 3 and rows[-1] == given[-1] and rows[1:] == given[1:]
    assert rows.num_tokens == 10


def calls_per_step(rows: int) -> int:
    """Return the number of Python functions that a decode step of `rows` rows calls, without new blocks."""
    pool, log = BlockPool(rows * 4, LRU()), StepLog()
    limits = SchedulerLimits(rows, 1 << 16, 4 * BLOCK, BLOCK)
    scheduler = Scheduler(Blocks(pool, HashPrefixCache(pool, BLOCK), BLOCK), Policy(), limits, log)
    engine = Engine(scheduler, ConstantExecutor(1000), NoGrammar(), 2, log)
    for i in range(rows):
        prompt = [(7 * i + j) % 1000 for j in range(BLOCK + 1)]
        engine.add(EngineRequest(f"r{i}", prompt, SamplingParams(max_tokens=99), stop_ids=[999]))
    for _ in range(4):
        engine.step()
    counts: Counter[str] = Counter()

    def count(frame: object, event: str, argument: object) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        outputs = engine.step()
    finally:
        sys.setprofile(None)
    assert len(outputs) == rows and all(len(output.token_ids) == 1 for output in outputs)
    return counts["call"]


def test_a_decode_row_costs_no_python_call() -> None:
    assert calls_per_step(8) == calls_per_step(200)
