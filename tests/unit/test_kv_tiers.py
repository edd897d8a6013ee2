"""Host memory and disk behind the device: random loads agree with sequential decoding, whatever moves when."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from test_scheduler import (
    EOS,
    VOCAB,
    CountingShares,
    FakeDevice,
    assign_clients,
    drain,
    make_engine,
    random_requests,
    reference,
    request,
    serve_at_random,
)

from quire.core.block_pool import BlockPool
from quire.core.fetches import FetchBook
from quire.core.host_tier import DiskTier, HostTier
from quire.core.kv_tiers import KVTiers
from quire.core.prefix_cache import HashPrefixCache
from quire.core.snapshot_pages import NO_PAGES, SnapshotPages
from quire.core.snapshot_pool import SnapshotPool
from quire.types import BlockKey, TransferEnd, TransferOrder

assert VOCAB and EOS == 0  # of the model that `reference` is


class FakeMover:
    """A mover over dictionaries. Copies end in any order, as late as the random numbers want, and files get lost.

    As on a GPU, a save runs in the stream of steps, and a load starts when the steps launched before it have run.
    """

    def __init__(
        self, device: FakeDevice, seed: int = 0, loses: float = 0.0, pages: SnapshotPages = NO_PAGES
    ) -> None:
        self.device, self.rng, self.loses, self.pages = device, random.Random(seed), loses, pages
        self.loaded: dict[int, list] = {}  # by snapshot row: what has been loaded into its pages
        self.rows: dict[int, dict] = {}
        self.files: dict[BlockKey, dict] = {}
        self.saving: Counter[int] = Counter()
        self.open: list[tuple[TransferOrder, list]] = []
        self.closed, self.loaded_snapshots = False, 0

    def start(self, orders: list[TransferOrder]) -> None:
        for order in orders:
            reached: list = []  # gets an entry when the stream has reached the order
            if order.kind == "save":
                self.saving.update(order.targets)
                self.device.queue.append(lambda order=order, reached=reached: self._save(order, reached))
            else:
                self.device.queue.append(lambda reached=reached: reached.append(True))
            self.open.append((order, reached))

    def _save(self, order: TransferOrder, reached: list) -> None:
        for block, row in zip(order.sources, order.targets):
            self.rows[row] = self._contents(block)
            self.saving[row] -= 1
        reached.append(True)

    def _page(self, number: int) -> tuple[int, int] | None:
        """Return the snapshot row and the index of a page, or None for the number of a block."""
        if not self.pages.count or number < self.pages.first:
            return None
        return divmod(number - self.pages.first, self.pages.count)

    def _contents(self, number: int) -> dict:
        if page := self._page(number):
            return {page[1]: self.device.snapshots[page[0]]}
        size, kv = self.device.block_size, self.device.kv
        return {p: kv[number, p] for p in range(size) if (number, p) in kv}

    def _fill(self, number: int, contents: dict) -> None:
        if page := self._page(number):
            self._fill_page(*page, contents)
            return
        for position, entry in contents.items():
            self.device.kv[number, position] = entry

    def _fill_page(self, row: int, index: int, contents: dict) -> None:
        """Load a page of a snapshot, whose row holds a state when all of its pages are of that state."""
        snapshots, whole = self.device.snapshots, self.loaded.get(row)
        if whole is None or snapshots.get(row) is not whole:  # the device has used the row since
            whole = self.loaded[row] = [None] * self.pages.count
        whole[index] = contents.get(index, "of another page")
        snapshots[row] = whole
        if len(set(whole)) == 1:
            snapshots[row] = whole[0]
            self.loaded_snapshots += 1

    def _copy(self, order: TransferOrder) -> list[int]:
        failed = []
        for index, (source, target) in enumerate(zip(order.sources, order.targets)):
            if order.kind == "load":
                assert not self.saving[source], "a row is loaded that is not saved yet"
                self._fill(target, self.rows[source])
            elif order.kind == "write":
                self.files[order.keys[index]] = dict(self.rows[source])
            elif order.kind == "read":
                found = self.files.get(order.keys[index])
                if found is None or self.rng.random() < self.loses:
                    failed.append(index)
                    self.rows[target] = {0: "spoiled"}
                else:
                    self.rows[target] = dict(found)
        return failed

    def ended(self) -> list[TransferEnd]:
        ends = []
        for order, reached in list(self.open):
            if not reached and not self.device.queue:
                reached.append(True)
            if reached and self.rng.random() < 0.5 and not self._behind_a_save(order):
                self.open.remove((order, reached))
                ends.append(TransferEnd(order.ticket, self._copy(order)))
        return ends

    def _behind_a_save(self, order: TransferOrder) -> bool:
        return order.kind in ("load", "write") and any(self.saving[row] for row in order.sources)

    def drop(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.files.pop(key, None)

    def wait(self, timeout_s: float) -> None:
        while self.device.queue:
            self.device.queue.popleft()()

    def close(self) -> None:
        self.closed = True


def add_tiers(engine, rows: int, files: int, seed: int = 0, loses: float = 0.0) -> KVTiers:
    """Put host memory and a disk behind the device of an engine that caches prefixes."""
    blocks, pages = engine.scheduler.blocks, NO_PAGES
    if isinstance(blocks.snapshots, SnapshotPool):
        pages = SnapshotPages(
            len(blocks.groups), blocks.pool.num_blocks + 1, random.Random(seed).choice([1, 3])
        )
    mover = FakeMover(engine.executor, seed, loses, pages)
    tiers = KVTiers(
        FetchBook(blocks, blocks.cache, pages),
        mover,
        HostTier(rows),
        DiskTier(files),
        engine.log.totals,
        block_bytes=10,
    )
    engine.scheduler.connector = engine.scheduler.life.connector = tiers
    return tiers


def conversations(rng: random.Random, max_len: int) -> list:
    """Requests of a few families with long common prefixes, so that blocks are evicted and wanted again."""
    families = [[rng.randrange(1, VOCAB) for _ in range(max_len)] for _ in range(3)]
    found = [*random_requests(rng, max_len), *random_requests(rng, max_len)]
    for number, one in enumerate(found):
        one.id = f"r{number}"
        if rng.random() < 0.7:
            one.prompt = rng.choice(families)[: rng.randrange(4, max_len - 8)] + [rng.randrange(1, VOCAB)]
    return found


def random_run(seed: int, fails: bool = False, hard: bool = False, **settings) -> dict[str, int]:
    """Run a random load. With `hard` every tier is in use and loses much, so that a broken rule shows early."""
    rng = random.Random(seed)
    engine, max_len = make_engine(rng, prefix=True, layout="paged", **settings)
    rows, files, loses = rng.choice([1, 3, 8, 200]), rng.choice([0, 4, 100]), rng.choice([0, 0, 0.3])
    tiers = add_tiers(engine, *((40, 100) if hard else (rows, files)), seed, 0.5 if hard else loses)
    engine.executor.failing = random.Random(seed) if fails else None
    todo = conversations(rng, max_len)
    assign_clients(random.Random(seed), todo)
    engine.scheduler.shares.__class__, engine.scheduler.shares.counts = CountingShares, Counter()
    added, got, ended = serve_at_random(engine, todo, rng, arrivals=0.3)
    for name, one in added.items():
        want = reference(one, max_len)
        assert got[name] == (want[: len(got[name])] if ended[name] in ("abort", "error") else want), (
            seed,
            name,
        )
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks and not list(tiers.pinned())
    assert len(tiers.mover.files) <= max(tiers.disk.capacity, 0) + 32
    totals = engine.log.totals
    return {
        **totals.fetched_tokens,
        "preemptions": totals.preemptions,
        "saved": totals.moved_bytes.get("save", 0),
        "snapshots": tiers.mover.loaded_snapshots,
    }


@pytest.mark.parametrize("start", range(0, 300, 150))
def test_random_loads_agree_with_sequential_decoding(start: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(start, start + 150):
        seen.update(random_run(seed, fails=seed % 3 == 0))
    assert all(seen[name] for name in ("host", "disk", "saved", "preemptions", "snapshots")), seen


SMALL = dict(
    max_len=40,
    layout="paged",
    block_size=4,
    chunk=True,
    budget=64,
    num_blocks=8,
    depth=2,
    prefix=True,
    mixed=64,
    rows=3,
)


def small_engine(rows: int = 20, files: int = 0, **settings):
    from quire.core.block_pool import LRU
    from quire.core.policy import continuous, fcfs

    engine, _ = make_engine(**{**SMALL, "evictor": LRU, "order": fcfs, "admits": continuous, **settings})
    return engine, add_tiers(engine, rows, files)


def test_an_evicted_prefix_returns_and_others_run_meanwhile() -> None:
    engine, tiers = small_engine()
    first = [1 + i % 7 for i in range(17)]
    engine.add(request("first", first))
    drain(engine)
    engine.add(request("other", [9] * 24))
    drain(engine)
    assert len(tiers.host) > 0
    tiers.mover.rng.random = lambda: 1.0  # no copy ends
    engine.add(request("again", first))
    engine.add(request("runs", [3, 4]))
    outputs = []
    for _ in range(12):
        outputs += engine.step()
    again = engine.scheduler.requests["again"]
    assert again.status == "loading" and again.slot == -1 and again.held == "loading"
    assert [o.finish_reason for o in outputs if o.id == "runs"][-1] == "length"
    tiers.mover.rng.random = lambda: 0.0
    assert drain(engine)["again"]
    timing = again.timing
    assert timing.cached_tokens == 16 and timing.fetched_tokens["host"] >= 4 and "loading" in timing.waited_s


def test_an_abort_while_loading_gives_the_blocks_back_when_the_copy_ends() -> None:
    engine, tiers = small_engine()
    first = [1 + i % 7 for i in range(17)]
    for name, prompt in (("first", first), ("other", [9] * 24)):
        engine.add(request(name, prompt))
        drain(engine)
    tiers.mover.rng.random = lambda: 1.0
    engine.add(request("again", first))
    for _ in range(4):
        engine.step()
    engine.abort("again")
    engine.step()
    pool = engine.scheduler.pool
    assert pool.num_free < pool.num_blocks and engine.has_work, "the copy still writes into its blocks"
    tiers.mover.rng.random = lambda: 0.0
    drain(engine)
    assert pool.num_free == pool.num_blocks


def test_salt_separates_clients_in_host_memory() -> None:
    engine, _ = small_engine()
    prompt = [1 + i % 7 for i in range(17)]
    engine.add(request("mine", prompt, cache_salt="a"))
    drain(engine)
    engine.add(request("other", [9] * 24))
    drain(engine)
    engine.add(request("yours", prompt, cache_salt="b"))
    drain(engine)
    assert not engine.log.totals.fetched_tokens
    engine.add(request("mine again", prompt, cache_salt="a"))
    drain(engine)
    assert engine.log.totals.fetched_tokens["host"] > 0


def test_equal_secrets_give_equal_names() -> None:
    def name(secret: bytes | None) -> bytes:
        engine, _ = small_engine()
        cache = HashPrefixCache(BlockPool(9, engine.scheduler.pool.evictor), 4, secret=secret)
        engine.add(request("r", [1, 2, 3, 4, 5]))
        asked = engine.scheduler.requests["r"]
        cache.match(asked)
        return asked.names[0]

    assert name(b"one") == name(b"one") and name(b"one") != name(b"two") and name(None) != name(None)


def _break_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows be given away while they are copied."""
    original = HostTier.add

    def add(self: HostTier, key: BlockKey):
        for block in self._blocks.values():
            block.users = 0
        return original(self, key)

    monkeypatch.setattr(HostTier, "add", add)


def _break_abandoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back the blocks of a fetch although copies into them are in flight."""
    original = FetchBook.drop

    def drop(self: FetchBook, dropped) -> None:
        if fetch := self._fetches.get(dropped.id):
            fetch.missing.clear()
        original(self, dropped)

    monkeypatch.setattr(FetchBook, "drop", drop)


def _break_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a failed copy has left for the block."""
    monkeypatch.setattr(
        FakeMover, "ended", lambda self, ended=FakeMover.ended: [e._replace(failed=[]) for e in ended(self)]
    )


def _break_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save blocks after the step that overwrites them."""
    original = FakeMover.start

    def start(self: FakeMover, orders) -> None:
        original(self, [])
        self.device.queue.append(lambda: original(self, orders))

    monkeypatch.setattr(FakeMover, "start", start)


def _break_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish a snapshot when its first page arrives."""

    def arrive_page(self: FetchBook, fetch, item, ok: bool) -> None:
        self.snapshots.insert(item.key[1], fetch.row)

    monkeypatch.setattr(FetchBook, "_arrive_page", arrive_page)


RULES = [_break_pinning, _break_abandoning, _break_failures, _break_saving, _break_pages]


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_noticed(rule, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(monkeypatch)
    settings = {} if rule is _break_pages else {"snapshots": None}  # loads fetch more blocks without states
    with pytest.raises(Exception):  # noqa: B017  an assertion, or a crash of the loop
        for seed in range(1000, 2000):
            random_run(seed, hard=True, **settings)
