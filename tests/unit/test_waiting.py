"""The order of waiting requests between clients, and the executor of the dry run, which the server tests rely on."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.core.block_pool import LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy, priority
from quire.core.prefix_cache import HashPrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.steplog import StepLog
from quire.types import EngineRequest, SamplingParams
from quire.worker.echo_executor import EchoExecutor

EOS = 0


def engine(max_num_seqs: int = 2, blocks: int = 1000, policy: Policy | None = None) -> Engine:
    pool = BlockPool(blocks, LRU())
    log = StepLog()
    limits = SchedulerLimits(max_num_seqs, 64, 256, 4)
    scheduler = Scheduler(Blocks(pool, HashPrefixCache(pool, 4), 4), policy or Policy(), limits, log)
    return Engine(
        scheduler, EchoExecutor(100, EOS, frozenset({EOS})), NoGrammar(), 2, log, check_invariants=True
    )


def request(
    name: str, client: str = "", tokens: int = 8, prompt: int = 4, weight: float = 1.0, rank: int = 0
) -> EngineRequest:
    ids = [1 + (7 * i + len(name)) % 99 for i in range(prompt)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return EngineRequest(name, ids, params, client=client, weight=weight, priority=rank)


def finished_order(host: Engine) -> list[str]:
    order = []
    while host.has_work:
        order += [output.id for output in host.step() if output.finish_reason]
    return order


def test_one_client_is_served_in_order() -> None:
    host = engine(max_num_seqs=1)
    for i in range(6):
        host.add(request(f"a{i}"))
    assert finished_order(host) == [f"a{i}" for i in range(6)]


def test_a_burst_does_not_starve_a_latecomer() -> None:
    host = engine(max_num_seqs=1)
    for i in range(20):
        host.add(request(f"a{i}", "alpha"))
    for _ in range(10):
        host.step()
    for i in range(3):
        host.add(request(f"b{i}", "beta"))
    order = finished_order(host)
    assert order.index("b0") <= 2 and order.index("b2") <= 7
    ours = [int(name[1:]) for name in order if name[0] == "a"]
    assert ours == sorted(ours)


@pytest.mark.parametrize(("weight", "low", "high"), [(1.0, 9, 11), (3.0, 14, 16)])
def test_tokens_are_shared_by_weight(weight: float, low: int, high: int) -> None:
    """Outputs of beta are longer than those of alpha, so beta gets fewer outputs and not more tokens."""
    host = engine(max_num_seqs=1)
    for i in range(80):
        host.add(request(f"a{i}", "alpha", tokens=6, weight=weight))
        host.add(request(f"b{i}", "beta", tokens=36))
    host.step()
    while sum(host.scheduler.shares.served.values()) < 800:
        host.step()
    served = host.scheduler.shares.served
    assert low / 20 <= served["alpha"] / sum(served.values()) <= high / 20


def test_absence_saves_up_nothing() -> None:
    host = engine(max_num_seqs=1)
    host.add(request("b", "beta"))
    finished_order(host)
    for i in range(30):
        host.add(request(f"a{i}", "alpha"))
    for _ in range(150):  # only alpha is served, for a long time
        host.step()
    for i in range(8):
        host.add(request(f"b{i}", "beta"))
    first = [name[0] for name in finished_order(host)[:10]]
    assert Counter(first)["b"] <= 6


def test_priority_comes_before_fairness() -> None:
    host = engine(max_num_seqs=1, policy=Policy(order=priority))
    host.add(request("first", "alpha"))
    host.step()
    for i in range(3):
        host.add(request(f"b{i}", "beta", rank=5))
        host.add(request(f"a{i}", "alpha", rank=1))
    assert finished_order(host) == ["first", "a0", "a1", "a2", "b0", "b1", "b2"]


@pytest.mark.parametrize(("client", "first"), [("alpha", False), ("beta", True)])
def test_preempted_requests_go_on_before_those_of_their_client(client: str, first: bool) -> None:
    """With blocks for one and a half requests the later one is preempted. Only new requests of other clients overtake it."""
    host = engine(max_num_seqs=2, blocks=18)
    host.add(request("a0", "alpha", tokens=40))
    host.add(request("a1", "alpha", tokens=40))
    while not host.log.totals.preemptions:
        host.step()
    host.add(request("n0", client, tokens=4))
    order = finished_order(host)
    assert sorted(order) == ["a0", "a1", "n0"] and (order[0] == "n0") == first


def test_counts_after_aborts() -> None:
    host = engine(max_num_seqs=1)
    for i in range(5):
        host.add(request(f"a{i}", "alpha", prompt=5))
        host.add(request(f"b{i}", "beta", prompt=3))
    waiting = host.scheduler.waiting
    assert len(waiting) == 10 and waiting.tokens == 40
    for i in range(4):
        host.abort(f"b{i}")
    assert len(waiting) == 6 and waiting.tokens == 28 and len(list(waiting)) == 6
    finished_order(host)
    assert len(waiting) == 0 and waiting.tokens == 0
    cached = 4 * 4  # prompts of alpha are equal: later ones find their first block for free
    assert host.scheduler.shares.served == {"alpha": 5 * (5 + 8) - cached, "beta": 3 + 8}


def test_the_echo_does_not_depend_on_company() -> None:
    host = engine(max_num_seqs=8, blocks=30)  # few enough for preemptions
    prompts = {f"r{i}": request(f"r{i}", tokens=30, prompt=5 + i) for i in range(6)}
    for one in prompts.values():
        host.add(one)
    got: dict[str, list[int]] = {name: [] for name in prompts}
    while host.has_work:
        for output in host.step():
            got[output.id] += output.token_ids
    assert host.log.totals.preemptions > 0
    for name, one in prompts.items():
        assert got[name] == (one.prompt + [EOS] * 30)[:30]


def test_the_echo_makes_up_log_probabilities() -> None:
    host = engine()
    one = request("r", tokens=3)
    one.params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1)
    host.add(one)
    outputs = []
    while host.has_work:
        outputs += host.step()
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    assert [entry.ids[0] for entry in logprobs] == one.prompt[:3]
    assert all(entry.logprobs == pytest.approx([-0.1, -0.1, -1.0]) and entry.rank == 1 for entry in logprobs)
    prompt = [entry for output in outputs for entry in output.prompt_logprobs or []]
    assert [entry.ids[0] for entry in prompt] == one.prompt[1:] and len(prompt[0].ids) == 2
