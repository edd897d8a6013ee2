"""The connector to host memory and disk: evicted blocks go there, and come back when a request begins with them.

    device --save--> host memory --write--> disk         in the background, least recently used blocks last
    device <--load-- host memory <--read--- disk         for a request, which is `loading` meanwhile

A block that the pool evicts is saved before the next step is launched, in stream order, so its next owner cannot
overwrite it first. So is a snapshot of states, whose pages (snapshot_pages.py) are handled as blocks. What is saved is also written to the disk, if there is one; then host memory can drop it at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from quire.core.connector import LoadNews, NoConnector
from quire.core.fetches import Fetch, FetchBook, FetchItem
from quire.core.host_tier import DiskTier, HostBlock, HostTier
from quire.core.prefix_cache import PrefixMatch
from quire.types import BlockKey, BlockMover, Request, Totals, TransferKind, TransferOrder

_WRITES = 32  # blocks that are written to the disk at once
_WAIT_S = 2e-3  # for a copy, when nothing else is left to do: new requests arrive in the meantime


class KVTiers(NoConnector):
    """The scheduler half of the connector to host memory and disk.

    Args:
        book: the fetches of waiting requests.
        mover: the worker half.
        host: the rows of host memory.
        disk: the files; its capacity is 0 without a disk.
        totals: the counters to which hits and moved bytes are added.
        block_bytes: bytes of a block on all ranks.
    """

    def __init__(
        self,
        book: FetchBook,
        mover: BlockMover,
        host: HostTier,
        disk: DiskTier,
        totals: Totals,
        block_bytes: int,
    ) -> None:
        self.book, self.mover, self.host, self.disk = book, mover, host, disk
        self._totals, self._block_bytes = totals, block_bytes
        self._orders: list[TransferOrder] = []
        self._ends: dict[int, Callable[[set[int]], None]] = {}  # by ticket; called with the failed copies
        self._tickets = 0
        self._evicted: list[tuple[BlockKey, int, HostBlock]] = []  # with the device block, to be saved
        self._unwritten: deque[BlockKey] = deque()  # saved blocks that are to be written to the disk
        self._writing = 0
        book.cache.watch(self._save, self._forget)
        book.snapshots.watch(self._save_snapshot)

    # ------------------------------------------------------------------------------ towards the device

    def match(self, request: Request, match: PrefixMatch) -> str:
        # If host memory has too few rows for what is on the disk, what it holds itself is better than nothing.
        begun = self._fetch(request, match, self._has) or self._fetch(request, match, self.host.__contains__)
        return "loading" if begun else ""

    def _fetch(self, request: Request, match: PrefixMatch, has: Callable[[BlockKey], bool]) -> bool:
        wanted = self.book.wanted(request, lambda group, name: has((group, name)))
        if not wanted:
            return False
        keys = [key for _, key in wanted]
        if self.book.wait_for_others(request, keys):
            return True
        if (unread := self._pin(keys)) is None:
            return False
        if (fetch := self.book.begin(request, wanted)) is None:
            self._unpin(keys, unread)
            return False
        self._count_hits(match, fetch, unread)
        ready = [item for item in fetch.items if item.key not in unread]
        self._load(fetch, ready, [self.host.at(item.key) for item in ready])
        self._read(fetch, [item for item in fetch.items if item.key in unread])
        return True

    def _has(self, key: BlockKey) -> bool:
        return key in self.host or key in self.disk

    def _pin(self, keys: list[BlockKey]) -> set[BlockKey] | None:
        """Keep the rows of `keys`, and give rows to those that are on the disk only.

        Returns:
            The keys that have to be read, or None if there are too few rows.
        """
        for key in keys:  # first, because a new row may evict any block without users
            if block := self.host.use(key):
                block.users += 1
        unread = {key for key in keys if key not in self.host}
        given = set[BlockKey]()
        for key in unread:
            self.disk.use(key)
            if (block := self.host.add(key)) is None:
                self._unpin([key for key in keys if key not in unread or key in given], given)
                return None
            block.users += 1
            given.add(key)
        return unread

    def _unpin(self, keys: Iterable[BlockKey], unread: set[BlockKey]) -> None:
        for key in keys:
            if block := self.host.use(key):
                if key in unread:
                    self.host.remove(key)
                self.host.release(block)

    def _count_hits(self, match: PrefixMatch, fetch: Fetch, unread: set[BlockKey]) -> None:
        """Count the tokens that a fetch adds to what the device has, by the slowest tier of each block."""
        size, begin = self.book.block_size, match.tokens // self.book.block_size
        slow = {item.place for item in fetch.items if item.key in unread and item.place >= begin}
        tokens = (1 + max(item.place for item in fetch.items)) * size - match.tokens
        from_disk = min(len(slow) * size, tokens)
        timing = fetch.request.timing
        for tier, count in (("host", tokens - from_disk), ("disk", from_disk)):
            if count > 0:
                timing.fetched_tokens[tier] = timing.fetched_tokens.get(tier, 0) + count
                self._totals.fetched_tokens[tier] = self._totals.fetched_tokens.get(tier, 0) + count

    def _load(self, fetch: Fetch, items: list[FetchItem], blocks: list[HostBlock]) -> None:
        """Copy the host rows of `blocks` into the device blocks of `items`."""
        if not items:
            return

        def end(failed: set[int]) -> None:
            for index, (item, block) in enumerate(zip(items, blocks)):
                self.host.release(block)
                self.book.arrive(fetch, item, index not in failed)

        self._order("load", [block.row for block in blocks], [item.block for item in items], end)

    def _read(self, fetch: Fetch, items: list[FetchItem]) -> None:
        """Copy files into the host rows of `items`, and from there into their device blocks."""
        if not items:
            return

        def end(failed: set[int]) -> None:
            for index in sorted(failed):  # the file is not there, or does not hold what was written
                self.host.remove(keys[index])
                self.host.release(blocks[index])
                self._delete([keys[index]] if self.disk.forget(keys[index]) else [])
                self.book.arrive(fetch, items[index], ok=False)
            good = [index for index in range(len(items)) if index not in failed]
            self._load(fetch, [items[index] for index in good], [blocks[index] for index in good])

        keys = [item.key for item in items]
        blocks = [self.host.at(key) for key in keys]
        self._order("read", [0] * len(items), [block.row for block in blocks], end, keys)

    # ------------------------------------------------------------------------------ away from the device

    def _save(self, group: int, name: bytes, block: int) -> None:
        """Keep the contents of a block that the pool gives to another owner."""
        key = (group, name)
        if self.host.use(key):
            return
        if kept := self.host.add(key):
            kept.users += 1
            self._evicted.append((key, block, kept))
        else:
            self._totals.unsaved_blocks += 1

    def _save_snapshot(self, name: bytes, row: int) -> None:
        """Keep a snapshot whose row the pool of snapshots gives to another owner."""
        pages = self.book.pages
        for (group, _), page in zip(pages.keys(name), pages.numbers(row)):
            self._save(group, name, page)

    def _forget(self, group: int, name: bytes) -> None:
        """Forget a block whose contents are not to be trusted, and the snapshot at its end."""
        for key in ((group, name), *self.book.pages.keys(name)):
            self.host.remove(key)
            self._delete([key] if self.disk.forget(key) else [])

    def _write(self) -> None:
        """Write saved blocks to the disk, a few at a time."""
        keys: list[BlockKey] = []
        while self._unwritten and self._writing + len(keys) < _WRITES:
            key = self._unwritten.popleft()
            if key not in self.disk and (block := self.host.use(key)):  # else it has left host memory
                block.users += 1
                keys.append(key)
        if not keys:
            return
        blocks = [self.host.at(key) for key in keys]
        self._writing += len(keys)

        def end(failed: set[int]) -> None:
            self._writing -= len(keys)
            for index, (key, block) in enumerate(zip(keys, blocks)):
                self.host.release(block)
                if index not in failed and not block.forgotten:
                    self.disk.add(key)
            self._delete(self.disk.surplus())

        self._order("write", [block.row for block in blocks], [0] * len(keys), end, keys)

    def _delete(self, keys: list[BlockKey]) -> None:
        if keys:
            self.mover.drop(keys)

    # ------------------------------------------------------------------------------ orders

    def _order(
        self,
        kind: TransferKind,
        sources: list[int],
        targets: list[int],
        end: Callable[[set[int]], None],
        keys: list[BlockKey] | None = None,
    ) -> None:
        self._tickets += 1
        self._ends[self._tickets] = end
        self._orders.append(TransferOrder(self._tickets, kind, sources, targets, keys or []))
        moved = self._totals.moved_bytes
        moved[kind] = moved.get(kind, 0) + len(sources) * self._block_bytes

    def plan(self) -> None:
        if self._evicted:
            evicted, self._evicted = self._evicted, []

            def end(failed: set[int]) -> None:
                for key, _, kept in evicted:
                    self.host.release(kept)
                    if self.disk.capacity and not kept.forgotten:
                        self._unwritten.append(key)

            rows = [kept.row for _, _, kept in evicted]
            self._order("save", [block for _, block, _ in evicted], rows, end)
            self._orders.insert(0, self._orders.pop())  # loads may be of rows that are saved now
        if self._unwritten:
            self._write()
        if self._orders:
            orders, self._orders = self._orders, []
            self.mover.start(orders)

    def done(self) -> list[LoadNews]:
        if self._ends:
            for ticket, failed in self.mover.ended():
                self._ends.pop(ticket)(set(failed))
        return [LoadNews(request_id) for request_id in self.book.arrived()]

    # ------------------------------------------------------------------------------ requests

    def start(self, request: Request) -> None:
        self.book.drop(request)

    def finish(self, request: Request) -> bool:
        self.book.drop(request)
        return False

    def reclaim(self, last: Request | None = None) -> bool:
        return self.book.reclaim(last)

    def pinned(self) -> Iterable[list[int]]:
        self.host.check()
        return self.book.pinned()

    @property
    def busy(self) -> bool:
        return bool(self._ends or self._evicted or self._unwritten)

    def wait(self) -> None:
        self.mover.wait(_WAIT_S)

    def close(self) -> None:
        self.mover.close()
