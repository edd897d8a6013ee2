"""Two schedulers that exchange blocks: random loads agree with sequential decoding, whatever moves, ends or dies when."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from test_scheduler import (
    VOCAB,
    WINDOWS,
    FakeDevice,
    make_engine,
    random_requests,
    reference,
    serve_at_random,
)

from quire.core.engine import Engine
from quire.core.exporter import BlockExporter
from quire.core.fetches import FetchBook
from quire.core.remote_prefill import RemotePrefill
from quire.types import EngineRequest, PrefillNews, TransferEnd, TransferOrder


class FakePuller:
    """A mover that copies when an order ends, at random: a block that its owner gives up before has other contents."""

    def __init__(self, device: FakeDevice, prefills: FakePrefills, rng: random.Random) -> None:
        self._device, self._prefills, self._rng = device, prefills, rng
        self._open: list[tuple[TransferOrder, FakeDevice, list]] = []

    def start(self, orders: list[TransferOrder]) -> None:
        for order in orders:
            reached: list = []  # gets an entry when the steps launched before the order have run
            self._device.queue.append(lambda reached=reached: reached.append(True))
            self._open.append((order, self._prefills.device, reached))

    def ended(self) -> list[TransferEnd]:
        ends = []
        for one in list(self._open):
            order, source, reached = one
            if (reached or not self._device.queue) and self._rng.random() < 0.4:
                self._open.remove(one)
                ends.append(TransferEnd(order.ticket, self._copy(order, source)))
        return ends

    def _copy(self, order: TransferOrder, source: FakeDevice) -> list[int]:
        failed = []
        for index, (theirs, ours) in enumerate(zip(order.sources, order.targets)):
            if self._rng.random() < self._prefills.loses:
                failed.append(index)
            for position in range(source.block_size):
                entry = source.kv.get((theirs, position), "never written")
                self._device.kv[ours, position] = "lost" if index in failed else entry
        return failed

    def wait(self, timeout_s: float) -> None:
        while self._device.queue:
            self._device.queue.popleft()()

    def close(self) -> None:
        pass


class FakePrefills:
    """A prefill engine in this process. It runs some steps at each call of `news`, and dies at random."""

    def __init__(self, rng: random.Random, settings: dict[str, Any], deaths: float, loses: float) -> None:
        self._rng, self._settings, self._deaths, self.loses = rng, settings, deaths, loses
        self.seen: Counter[str] = Counter()
        self._start()

    def _start(self) -> None:
        self.engine, _ = make_engine(self._rng, **self._settings)
        scheduler = self.engine.scheduler
        scheduler.connector = scheduler.life.connector = BlockExporter(scheduler.blocks)
        if self._deaths and self._rng.random() < 0.5:
            self.engine.executor.failing = random.Random(self._rng.random())
        self.open: set[str] = set()

    @property
    def device(self) -> FakeDevice:
        return self.engine.executor

    def submit(self, request: EngineRequest) -> int | None:
        if self._rng.random() < 0.1:
            return None
        self.open.add(request.id)
        self.engine.add(request)
        return 0

    def release(self, request_id: str) -> None:
        if request_id in self.open:
            self.open.remove(request_id)
            self.engine.abort(request_id)

    def news(self) -> list[PrefillNews]:
        if self.open and self._rng.random() < self._deaths:
            self.seen["deaths"] += 1
            lost = self.open
            self._start()
            return [PrefillNews(name, ended=True) for name in lost]
        found = []
        for _ in range(self._rng.randrange(4)):
            for output in self.engine.step():
                if output.id in self.open:
                    failed = output.finish_reason == "error"
                    self.seen.update(failed=failed)
                    ended = output.finish_reason is not None
                    found.append(PrefillNews(output.id, output.exported or (), ended, failed))
        return found

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def connect(engine: Engine, prefills: FakePrefills, rng: random.Random) -> RemotePrefill:
    """Have the prompts of an engine computed by `prefills`."""
    blocks = engine.scheduler.blocks
    mover = FakePuller(engine.executor, prefills, rng)
    book = FetchBook(blocks, blocks.cache)
    remote = RemotePrefill(book, mover, prefills, engine.log.totals, block_bytes=10)
    engine.scheduler.connector = engine.scheduler.life.connector = remote
    return remote


def long_prompts(rng: random.Random, max_len: int) -> list[EngineRequest]:
    """Return requests of which most have prompts of many blocks, some with a common beginning."""
    shared = [rng.randrange(1, VOCAB) for _ in range(max_len)]
    found = [*random_requests(rng, max_len), *random_requests(rng, max_len)]
    for number, one in enumerate(found):
        one.id = f"r{number}"
        if rng.random() < 0.8:
            own = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(4, max_len // 2))]
            one.prompt = [*shared[: rng.choice([0, max_len // 3])], *own]
    return found


def random_run(seed: int, hard: bool = False) -> Counter[str]:
    """Run a random load on an engine with a prefill engine. With `hard` prompts are computed beside many others."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "prefix": True, "layout": "paged", "snapshots": None, "stages": 1, "block_size": rng.choice([1, 3, 4]),
        "windows": rng.choice(WINDOWS), "max_len": 40,
    }  # fmt: skip
    engine, max_len = make_engine(rng, **settings)
    deaths, loses = (0.0, 0.0) if hard else (rng.choice([0, 0, 0.05]), rng.choice([0, 0, 0.2]))
    prefills = FakePrefills(rng, settings, deaths, loses)
    remote = connect(engine, prefills, rng)
    added, got, ended = serve_at_random(engine, long_prompts(rng, max_len), rng, arrivals=0.4)
    for name, one in added.items():
        want = reference(one, max_len)
        assert got[name] == (want[: len(got[name])] if ended[name] == "abort" else want), (seed, name)
    assert not prefills.open and not list(remote.pinned())
    for each in (engine, prefills.engine):
        while each.has_work:
            each.step()
        assert each.scheduler.pool.num_free == each.scheduler.pool.num_blocks, "a block is kept for ever"
    prefills.seen.update(
        pulled=engine.log.totals.moved_bytes.get("pull", 0), aborts=[*ended.values()].count("abort")
    )
    return prefills.seen


def test_random_loads_agree_with_sequential_decoding() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        seen.update(random_run(seed))
    assert all(seen[name] for name in ("pulled", "deaths", "failed", "aborts")), seen


def _break_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the prefill engine forget blocks as soon as it has shown them all."""
    original = FakePrefills.news

    def news(self: FakePrefills) -> list[PrefillNews]:
        found = original(self)
        for one in found:
            if one.ended:
                self.release(one.request_id)
        return found

    monkeypatch.setattr(FakePrefills, "news", news)


def _break_showing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show blocks before their tokens are computed."""
    original = BlockExporter.retire

    def retire(self: BlockExporter, rows: Any) -> Any:
        return original(self, [(one, one.prompt_len) for one, _ in rows])

    monkeypatch.setattr(BlockExporter, "retire", retire)


def _break_cancelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back the targets of copies in flight when their request ends."""
    original = FetchBook.drop

    def drop(self: FetchBook, dropped: Any) -> None:
        if fetch := self._fetches.get(dropped.id):
            fetch.missing.clear()
        original(self, dropped)

    monkeypatch.setattr(FetchBook, "drop", drop)


@pytest.mark.parametrize("rule", [_break_release, _break_showing, _break_cancelling])
def test_a_broken_rule_is_noticed(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  an assertion, or a crash of the loop
        for seed in range(1000, 1600):
            random_run(seed, hard=True)
