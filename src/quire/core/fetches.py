"""Blocks that are being fetched for waiting requests, or that have arrived and wait for them.

A fetch holds a reference to each of its blocks: those that the prefix cache had already, and those that it took for what
arrives. An arrived block is published at once, so any request finds it. The references end when the request is admitted
or ends, or when someone else needs the blocks more (`reclaim`). Targets of copies in flight cannot be given back.

Layers with a state need its snapshot at the end of the prefix. A fetch pins the row of that snapshot, or one that it
fills with fetched pages (snapshot_pages.py) and publishes when all of them have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.blocks import Blocks
from quire.core.prefix_cache import HashPrefixCache
from quire.core.snapshot_pages import NO_PAGES, SnapshotPages
from quire.types import BlockKey, Request


class FetchItem(NamedTuple):
    """A block to fetch: its place in the request, its key, and the device block that it is copied into.

    For a page of a snapshot: the place of the block at whose end the snapshot is, and the number of the page.
    """

    place: int
    key: BlockKey
    block: int


@dataclass(slots=True)
class Fetch:
    """The fetch of one request."""

    request: Request
    held: list[int]  # blocks with a reference of this fetch
    items: list[FetchItem]
    missing: set[BlockKey] = field(default_factory=set)  # not arrived yet
    row: int | None = None  # of the snapshot at the end, pinned
    lost_page: bool = False  # a page of the snapshot has not arrived
    abandoned: bool = False  # the request has been admitted or has ended


class FetchBook:
    """All fetches of an engine.

    Args:
        blocks: the blocks of all requests.
        cache: the prefix cache in which arrived blocks are published.
        pages: how snapshots of states are fetched.
    """

    def __init__(self, blocks: Blocks, cache: HashPrefixCache, pages: SnapshotPages = NO_PAGES) -> None:
        self.cache, self.block_size, self._pool = cache, blocks.block_size, blocks.pool
        self.snapshots, self.pages = blocks.snapshots, pages
        self._fetches: dict[str, Fetch] = {}  # by request; complete ones keep their order
        self._loose: list[Fetch] = []  # abandoned with copies in flight
        self.in_flight: set[BlockKey] = set()
        self._waiters: set[str] = set()  # requests that wait for blocks of another one's fetch
        self._arrived: list[str] = []

    @property
    def busy(self) -> bool:
        """Return whether copies are in flight."""
        return bool(self.in_flight)

    def wanted(self, request: Request, elsewhere: Callable[[int, bytes], bool]) -> list[tuple[int, BlockKey]]:
        """Return the places and keys of what to fetch for the longest prefix that can be served with it."""

        def kept(name: bytes) -> bool:
            return self.pages.count > 0 and all(elsewhere(*key) for key in self.pages.keys(name))

        reach = self.cache.reach(request, elsewhere, kept)
        found = [
            (index, (group, request.names[index]))
            for group, first in enumerate(self.cache.first_blocks(reach))
            for index in range(first, reach)
            if self.cache.block_of(group, request.names[index]) is None
        ]
        if reach and not self.snapshots.has(request.names[reach - 1]):
            found += [(reach - 1, key) for key in self.pages.keys(request.names[reach - 1])]
        return found

    def wait_for_others(self, request: Request, keys: Iterable[BlockKey]) -> bool:
        """Return whether one of `keys` is on its way for another request. If so, `arrived` returns this one too."""
        if self.in_flight.isdisjoint(keys):
            return False
        self._waiters.add(request.id)
        return True

    def begin(self, request: Request, wanted: list[tuple[int, BlockKey]]) -> Fetch | None:
        """Take blocks for what is fetched, and keep those of the prefix that are there. None if there are too few."""
        pages = [item for item in wanted if self.pages.holds(item[1])]
        wanted = [item for item in wanted if not self.pages.holds(item[1])]
        reach = 1 + max(index for index, _ in (*wanted, *pages))
        hits = [
            block
            for group, first in enumerate(self.cache.first_blocks(reach))
            for name in request.names[first:reach]
            if (block := self.cache.block_of(group, name)) is not None
        ]
        refs = self._pool.refs
        if len(wanted) > self._pool.num_free - sum(1 for block in hits if not refs[block]):
            return None
        name = request.names[reach - 1]
        if (row := self.snapshots.pin_new() if pages else self.snapshots.pin(name)) is None and pages:
            return None
        self._pool.share(hits)
        self.drop(request)  # an earlier fetch, which reached less far
        targets = self._pool.take(len(wanted))
        items = [FetchItem(index, key, block) for (index, key), block in zip(wanted, targets)]
        if row is not None:
            items += [FetchItem(*item, page) for item, page in zip(pages, self.pages.numbers(row))]
        fetch = Fetch(request, hits + targets, items, {item.key for item in items}, row)
        self._fetches[request.id] = fetch
        self.in_flight |= fetch.missing
        return fetch

    def arrive(self, fetch: Fetch, item: FetchItem, ok: bool) -> None:
        """Note the end of one copy, and publish the block unless the copy failed."""
        fetch.missing.discard(item.key)
        self.in_flight.discard(item.key)
        if self.pages.holds(item.key):
            self._arrive_page(fetch, item, ok)
        elif not (
            ok and self.cache.insert(item.key, item.block)
        ):  # or a request has computed it in the meantime
            fetch.held.remove(item.block)
            self._pool.release([item.block])
        if not fetch.missing:
            self._complete(fetch)

    def _arrive_page(self, fetch: Fetch, item: FetchItem, ok: bool) -> None:
        """Publish a snapshot once all its pages have arrived."""
        _, name = item.key
        fetch.lost_page |= not ok
        if not fetch.lost_page and fetch.missing.isdisjoint(self.pages.keys(name)):
            assert fetch.row is not None
            self.snapshots.insert(name, fetch.row)

    def _complete(self, fetch: Fetch) -> None:
        self._arrived += [fetch.request.id, *self._waiters]
        self._waiters.clear()
        if fetch.abandoned:
            self._loose.remove(fetch)
            self._give_up(fetch)

    def arrived(self) -> list[str]:
        """Return the ids of the requests whose fetch has ended since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def drop(self, request: Request) -> None:
        """Give up the blocks of a request's fetch, those of copies in flight when these end."""
        self._waiters.discard(request.id)
        if (fetch := self._fetches.pop(request.id, None)) is None:
            return
        if fetch.missing:
            fetch.abandoned = True
            self._loose.append(fetch)
        else:
            self._give_up(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        self._pool.release(fetch.held)
        if fetch.row is not None:
            self.snapshots.unpin(fetch.row)

    def reclaim(self, last: Request | None) -> bool:
        """Give up the blocks of the newest complete fetch, that of `last` last of all. Return False without one.

        If only a part has arrived, a request may hold blocks that its prefix does not reach, and lack those that it
        needs.
        """
        complete = [fetch.request for fetch in self._fetches.values() if not fetch.missing]
        if not complete:
            return False
        self.drop(max(reversed(complete), key=lambda request: request is not last))
        return True

    def pinned(self) -> Iterable[list[int]]:
        """Iterate over the blocks held by each fetch."""
        for fetch in (*self._fetches.values(), *self._loose):
            yield fetch.held
