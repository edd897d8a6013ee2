"""Snapshots of states: where they are taken, which prefix they serve, and what happens if rows are short."""

from __future__ import annotations

import random

import pytest
from test_scheduler import drain, make_engine, reference, request

from quire.core.block_pool import LRU
from quire.core.engine import Engine
from quire.core.snapshots import StateCopies
from quire.core.stats import figures_of, stats_of
from quire.types import EngineRequest

SETTINGS = dict(
    stages=1,
    max_len=40, layout="paged", block_size=4, chunk=True, budget=64, num_blocks=60, depth=2, prefix=True, rows=8,
    mixed=64, windows=(None,), interval=0, answers=0, evictor=LRU,
)  # fmt: skip


def engine_of(**settings) -> Engine:
    return make_engine(random.Random(0), **{**SETTINGS, "snapshots": 4, **settings})[0]


def run(engine: Engine, *requests: EngineRequest) -> list[int]:
    """Run requests at once, check their tokens, and return the cached tokens of each."""
    for each in requests:
        engine.add(each)
    before = len(engine.log)
    got = drain(engine)
    for each in requests:
        assert got[each.id] == reference(each, 40)
    records = list(engine.log)[before:]
    cached = {admitted.request_id: admitted.cached for record in records for admitted in record.admitted}
    return [cached[each.id] for each in requests]


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 3 * i) % 22 + 1 for i in range(length)]


def test_a_prompt_is_found_up_to_its_last_whole_block() -> None:
    engine = engine_of()
    assert run(engine, request("a", prompt_of(19))) == [0]
    assert run(engine, request("b", prompt_of(19)), request("c", prompt_of(30))) == [16, 16]
    assert run(engine, request("d", prompt_of(15))) == [0], "a snapshot was used in front of its end"


def test_answers_to_one_prompt_copy_its_state() -> None:
    engine = engine_of()
    assert run(engine, *(request(name, prompt_of(21)) for name in "abc")) == [0, 20, 20]
    assert max(len(record.rows) for record in engine.log) == 3


def test_a_shared_beginning_gets_a_snapshot_when_it_is_seen_again() -> None:
    engine = engine_of()
    shared = prompt_of(13)
    prompts = [shared + prompt_of(9, first) for first in (2, 7, 11)]
    assert [run(engine, request(f"r{i}", prompt)) for i, prompt in enumerate(prompts)] == [[0], [0], [12]]


def test_a_fixed_distance_serves_other_places() -> None:
    engine = engine_of(interval=8)
    long = prompt_of(30)
    assert run(engine, request("a", long)) == [0]
    assert run(engine, request("b", long[:11])) == [8]
    assert run(engine, request("c", [*long[:17], 21, 22, 20])) == [16]


def test_the_next_turn_goes_on_from_the_answer() -> None:
    """Of the snapshots in an answer only the latest one stays."""
    engine = engine_of(answers=4, snapshots=9)
    first = request("a", prompt_of(9), max_tokens=20)
    assert run(engine, first) == [0]
    assert engine.scheduler.blocks.snapshots.num_named == 2  # at the end of the prompt, and in the answer
    history = prompt_of(9) + reference(first, 40)
    assert run(engine, request("b", [*history, 5, 6], max_tokens=2)) == [24]
    assert run(engine, request("c", prompt_of(9), max_tokens=2)) == [8]


def test_the_least_recently_used_snapshot_makes_room() -> None:
    engine = engine_of(snapshots=2)
    first, second, third = (request(name, prompt_of(13, at)) for at, name in enumerate("abc"))
    run(engine, first)
    run(engine, second)
    assert run(engine, request("a again", first.prompt)) == [12]
    run(engine, third)
    assert engine.scheduler.blocks.snapshots.evictions == 1
    assert run(engine, request("a more", first.prompt), request("b again", second.prompt)) == [12, 0]


def test_a_preempted_request_goes_on_from_its_snapshot() -> None:
    engine = engine_of(num_blocks=14, rows=2, answers=8)
    one, two = request("a", prompt_of(17), max_tokens=20), request("b", prompt_of(17, 5), max_tokens=20)
    engine.add(one)
    engine.add(two)
    got = drain(engine)
    assert got == {"a": reference(one, 40), "b": reference(two, 40)}
    again = [a for record in engine.log for a in record.admitted if a.request_id == "b"]
    assert len(again) > 1 and again[-1].cached >= 16


def test_short_rows_of_snapshots_cost_hits_only() -> None:
    engine = engine_of(snapshots=1, interval=8)
    assert run(engine, *(request(str(i), prompt_of(20, i), max_tokens=9) for i in range(5))) == [0] * 5


def test_a_row_that_a_step_uses_is_not_filled_from_elsewhere() -> None:
    engine = engine_of(snapshots=1)
    run(engine, request("a", prompt_of(19)))
    snapshots = engine.scheduler.blocks.snapshots
    engine.add(request("b", prompt_of(19)))
    planned: list[int | None] = []
    end_step = snapshots.end_step

    def ending(copies: StateCopies) -> None:
        planned.append(snapshots.pin_new() if copies.restores else None)
        end_step(copies)

    snapshots.end_step = ending  # type: ignore[method-assign]
    engine.step()
    assert engine.scheduler.running[0].cached == 16 and planned == [None], "the restored row was given away"
    drain(engine)
    row = snapshots.pin_new()
    assert row == 0 and snapshots.pin_new() is None and not snapshots.num_named
    snapshots.unpin(row)
    engine.scheduler.check()


def test_figures_count_snapshots() -> None:
    engine = engine_of(snapshots=1)
    run(engine, request("a", prompt_of(19)))
    run(engine, request("b", prompt_of(19, 7)))
    stats, figures = stats_of(engine, 2), figures_of(engine, 0)
    assert (stats.snapshots, stats.snapshot_rows, stats.totals["snapshot_evictions"]) == (1, 1, 1)
    assert (figures.snapshots, figures.snapshot_evictions) == (1, 1)


def test_the_reason_of_a_missing_snapshot_is_told() -> None:
    engine = engine_of()
    shared = prompt_of(13)
    run(engine, request("a", shared + [1, 2]))
    engine.add(request("b", [*shared[:9], 20, 21, 22]))
    engine.step()
    (running,) = engine.scheduler.running
    assert running.cached == 0 and running.timing.prefix_end == "state"


@pytest.mark.parametrize("length, places", [(3, []), (9, [8]), (16, [12]), (17, [16])])
def test_where_a_prompt_has_a_snapshot(length: int, places: list[int]) -> None:
    engine = engine_of()
    engine.add(request("a", prompt_of(length), max_tokens=2))
    ends = [0]
    while engine.has_work:
        engine.step()
    for record in engine.log:
        ends += [start + count for _, start, count in record.rows]
    assert [end for end in ends if end and end < length] == places
