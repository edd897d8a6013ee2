"""Fairness between clients: a new client gets its first token at once, and no request makes room too often."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.core import shares
from quire.core.block_pool import LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy, priority, static, whole
from quire.core.prefix_cache import HashPrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.shares import QUANTUM, Shares
from quire.core.steplog import StepLog
from quire.types import EngineRequest, SamplingParams
from quire.worker.echo_executor import EchoExecutor

EOS = 0


def engine(
    slots: int = 4, blocks: int = 1000, policy: Policy | None = None, budget: int = 64, mixed: int = 64
) -> Engine:
    pool = BlockPool(blocks, LRU())
    log = StepLog()
    limits = SchedulerLimits(slots, budget, 256, 4, mixed_prefill_tokens=mixed)
    scheduler = Scheduler(Blocks(pool, HashPrefixCache(pool, 4), 4), policy or Policy(), limits, log)
    return Engine(
        scheduler, EchoExecutor(100, EOS, frozenset({EOS})), NoGrammar(), 2, log, check_invariants=True
    )


def request(
    name: str, client: str, tokens: int = 200, prompt: int = 4, weight: float = 1.0, rank: int = 0
) -> EngineRequest:
    ids = [1 + (7 * i + sum(name.encode())) % 99 for i in range(prompt)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return EngineRequest(name, ids, params, client=client, weight=weight, priority=rank, cache_salt=client)


def add(host: Engine, count: int, client: str, **fields) -> list[EngineRequest]:
    added = [request(f"{client}{i}", client, **fields) for i in range(count)]
    for one in added:
        host.add(one)
    return added


def steps_to_first_token(host: Engine, name: str, most: int = 200) -> int:
    for step in range(1, most):
        if any(output.id == name and output.token_ids for output in host.step()):
            return step
    raise AssertionError(f"no token of {name} within {most} steps")


def held(host: Engine) -> Counter[str]:
    return Counter(r.source.client for r in host.scheduler.running)


def run(host: Engine, steps: int) -> None:
    for _ in range(steps):
        host.step()


def test_a_newcomer_gets_a_slot_of_a_client_that_holds_them_all() -> None:
    host = engine(slots=4)
    add(host, 100, "a")
    run(host, 20)
    assert held(host) == {"a": 4}
    newest = host.scheduler.running[-1].id
    host.add(request("b0", "b"))
    assert steps_to_first_token(host, "b0") <= 3
    assert held(host) == {"a": 3, "b": 1} and host.scheduler.requests[newest].status == "waiting"


def test_a_newcomer_gets_blocks_of_a_client_that_holds_them_all() -> None:
    host = engine(slots=8, blocks=64)
    add(host, 4, "a", prompt=60, tokens=40)
    run(host, 8)
    assert host.scheduler.pool.num_free < 15
    host.add(request("b0", "b", prompt=60, tokens=40))
    assert steps_to_first_token(host, "b0") <= 3


@pytest.mark.parametrize("what", ["the only slot", "all blocks"])
def test_a_newcomer_takes_turns_with_a_single_request_that_holds(what: str) -> None:
    host = engine(slots=1, blocks=1000) if what == "the only slot" else engine(slots=4, blocks=64)
    (greedy,) = add(host, 1, "a", prompt=20 if what == "the only slot" else 160, tokens=96)
    run(host, QUANTUM + 10)
    host.add(request("b0", "b", tokens=90, prompt=100))
    assert steps_to_first_token(host, "b0") <= 6
    while host.has_work:
        host.step()
    assert host.log.totals.yielded <= 2 * (1 + 90 // QUANTUM)
    assert greedy.id not in host.scheduler.requests


def test_a_newcomer_among_as_many_clients_as_slots() -> None:
    host = engine(slots=4)
    for client in "acde":
        host.add(request(f"{client}0", client))
    run(host, 5)  # no request has had a whole turn
    host.add(request("b0", "b"))
    assert steps_to_first_token(host, "b0") <= QUANTUM + 3


def test_long_prompts_of_others_leave_tokens_to_a_newcomer() -> None:
    host = engine(slots=16, budget=16, mixed=8)
    add(host, 12, "a", prompt=200)
    run(host, 3)
    for name in ("b0", "b1"):
        host.add(request(name, "b", prompt=16, tokens=2))
        assert steps_to_first_token(host, name) <= 8
    host.add(request("c0", "c", prompt=100))  # its prompt takes several steps, in turn with those of a
    assert steps_to_first_token(host, "c0") <= 2 * 100 / 8 + 8


def test_a_stream_of_newcomers_does_not_starve_a_long_prompt() -> None:
    host = engine(slots=8, budget=16, mixed=16)
    add(host, 200, "b", prompt=16, tokens=1)
    run(host, 3)
    host.add(request("a0", "a", prompt=200))
    assert steps_to_first_token(host, "a0") <= 2 * 200 / 16 + 8


def test_shares_follow_weights_and_stay_there() -> None:
    host = engine(slots=8)
    add(host, 40, "a", weight=1.0)
    run(host, 10)
    add(host, 40, "b", weight=3.0)
    run(host, 15)
    assert held(host) == {"a": 2, "b": 6}
    before = host.log.totals.yielded
    run(host, 150)
    assert held(host) == {"a": 2, "b": 6} and host.log.totals.yielded == before == 6


def test_what_is_free_is_not_withheld() -> None:
    host = engine(slots=8)
    add(host, 8, "a")
    host.add(request("b0", "b", tokens=5))
    run(host, 40)
    assert held(host) == {"a": 8}


def test_an_answer_goes_on_where_it_was() -> None:
    host = engine(slots=2)
    prompts = {one.id: one.prompt for one in add(host, 4, "a", tokens=60, prompt=21)}
    got: dict[str, list[int]] = {f"{client}{i}": [] for client in "ab" for i in range(4)}
    step = 0
    while host.has_work:
        if (step := step + 1) == 30:
            prompts |= {one.id: one.prompt for one in add(host, 4, "b", tokens=60, prompt=9)}
        for output in host.step():
            got[output.id] += output.token_ids
    assert host.log.totals.yielded >= 1
    assert got == {name: (prompt + [EOS] * 60)[:60] for name, prompt in prompts.items()}


def test_a_resumed_request_recomputes_less_than_a_block() -> None:
    host = engine(slots=2)
    add(host, 2, "a", tokens=60, prompt=21)
    run(host, 30)
    host.add(request("b0", "b", tokens=5))
    outputs = []
    while host.has_work:
        outputs += host.step()
    (timing,) = [o.timing for o in outputs if o.id == "a1" and o.finish_reason]
    assert timing.preemptions == 1 and 0 < timing.recomputed_tokens <= 4 + 1


def test_newcomers_that_come_and_go_do_not_keep_a_request_from_running() -> None:
    """Short requests of b take slots again and again. A request of a that gave up its slot is spared for a while."""
    host = engine(slots=4)
    add(host, 8, "a", tokens=120)
    run(host, 10)
    number, ended = 0, {}
    while len([name for name in ended if name[0] == "a"]) < 8:
        if held(host) == {"a": 4} and host.scheduler.waiting.tokens <= 4 * 4:  # all of them run again
            host.add(request(f"b{number}", "b", tokens=2))
            number += 1
        for output in host.step():
            if output.finish_reason:
                ended[output.id] = output.timing.preemptions
    assert number > 20
    assert max(count for name, count in ended.items() if name[0] == "a") <= 1 + 120 // QUANTUM


def test_priority_comes_first() -> None:
    policy = Policy(order=priority)
    host = engine(slots=2, policy=policy)
    add(host, 6, "a", rank=1)
    run(host, 10)
    host.add(request("b0", "b", rank=5))
    run(host, 60)
    assert held(host) == {"a": 2}, "a request of lower priority makes others give way"
    host.add(request("c0", "c", rank=0))
    host.add(request("c1", "c", rank=0))
    assert steps_to_first_token(host, "c0") <= 3
    run(host, 4)
    assert held(host) == {"c": 2}


def test_a_static_batch_is_left_alone() -> None:
    host = engine(slots=2, policy=Policy(admits=static))
    add(host, 4, "a", tokens=80)
    run(host, 60)
    host.add(request("b0", "b"))
    run(host, 10)
    assert host.log.totals.preemptions == 0


def test_whole_prompts_find_room_too() -> None:
    host = engine(slots=4, budget=256, mixed=256, policy=Policy(chunk=whole))
    add(host, 30, "a", prompt=200, tokens=40)
    run(host, 10)
    host.add(request("b0", "b", prompt=240, tokens=5))
    assert steps_to_first_token(host, "b0") <= 8


def test_growth_takes_the_blocks_of_the_client_that_holds_most() -> None:
    host = engine(slots=8, blocks=40)
    add(host, 3, "a", prompt=40, tokens=60)
    run(host, 4)
    host.add(request("b0", "b", prompt=8, tokens=60))  # the newest request
    assert steps_to_first_token(host, "b0") <= 3
    mine = host.scheduler.requests["b0"]
    while host.log.totals.pressure < 2 and mine.status != "finished":
        host.step()
    assert host.log.totals.pressure and mine.preemptions == 0


def test_one_client_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("one client is balanced against nobody")

    for name in ("claim", "sort_by_turn", "turn", "line"):
        monkeypatch.setattr(Shares, name, never)
    host = engine(slots=2, blocks=30)
    add(host, 6, "", prompt=20, tokens=60)
    while host.has_work:
        host.step()
    assert host.log.totals.preemptions and not host.log.totals.yielded


def test_the_books_of_shares_are_checked() -> None:
    host = engine()
    add(host, 2, "a")
    run(host, 2)
    host.scheduler.shares.take_slot(host.scheduler.running[0])
    with pytest.raises(AssertionError, match="slots of clients"):
        host.scheduler.check()
    assert shares.QUANTUM > 1
