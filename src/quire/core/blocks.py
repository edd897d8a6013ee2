"""The blocks of all requests: one block table for each group of layers, over one pool.

The scheduler asks for tokens and never sees groups. All blocks have the same size in bytes, so a block that one group
releases serves any other. A model whose layers keep all entries has one group.

A group without a window takes the blocks of all known tokens when a request is admitted. A group with a window takes
those that the largest chunk needs. Each chunk then exchanges the blocks behind the window for new ones, so a prompt
that has begun needs no further blocks. Once a request decodes, blocks behind the window are released after the step
that reads them last has been planned: their next owner writes in a later step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.core.block_pool import BlockPool
from quire.core.prefix_cache import PrefixCache, PrefixMatch
from quire.core.snapshots import NoSnapshots, Snapshots, StateCopies
from quire.types import BlockTable, KVGroup, NewBlock, Request


class BlockDemand(NamedTuple):
    """The blocks that a waiting request needs to be admitted."""

    match: PrefixMatch  # what the prefix cache has of it
    fresh: int  # blocks besides those of `match`
    missing: int  # how many of these are not free; zero or less if all are

    @property
    def size(self) -> int:
        """Number of all blocks that the request would hold."""
        return len(self.match.blocks) + self.fresh


class Blocks:
    """The blocks of all requests of one engine.

    Args:
        pool: the blocks.
        cache: the prefix cache over the same pool and groups.
        block_size: tokens per block.
        groups: the groups of layers.
        step_tokens: most tokens of a step.
        snapshots: those of states, over the same names as `cache`; None if layers keep no states.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        block_size: int,
        groups: Sequence[KVGroup] = (KVGroup(),),
        step_tokens: int = 1 << 30,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.snapshots = snapshots or NoSnapshots()
        self.pool, self.cache, self.groups = pool, cache, groups
        self.block_size = self._block_size = block_size
        self._step_tokens = step_tokens
        self._windowed = [index for index, group in enumerate(groups) if group.window is not None]

    @property
    def follows_rows(self) -> bool:
        """Return whether the end of a block matters as soon as a row reaches it: to a window, or to a snapshot."""
        return bool(self._windowed or self.snapshots.num_rows)

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` KV entries holds at once."""
        return sum(group.most_blocks(tokens, self._step_tokens, self._block_size) for group in self.groups)

    def _end(self, group: KVGroup, first: int, known: int) -> int:
        """Return the end of a table that holds what a prompt of `known` tokens needs from block `first` on."""
        size = self._block_size
        return min(-(-known // size), first + group.most_blocks(known, self._step_tokens, size))

    # ------------------------------------------------------------------------------- admission

    def match(self, request: Request) -> PrefixMatch:
        """Return what the prefix cache has of the beginning of a request."""
        return self.cache.match(request)

    def demand(self, request: Request, match: PrefixMatch) -> BlockDemand:
        """Return what a waiting request needs."""
        fresh = sum(
            self._end(group, table.first, request.known) - len(table.blocks)
            for group, table in zip(self.groups, match.tables)
        )
        refs = self.pool.refs
        evictable = sum(1 for block in match.blocks if not refs[block])
        return BlockDemand(match, fresh, fresh - (self.pool.num_free - evictable))

    def admit(self, request: Request, demand: BlockDemand) -> None:
        """Give a request the blocks of `demand`, all of which are there."""
        match = demand.match
        self.pool.share(match.blocks)
        request.tables = match.tables
        for group, table in zip(self.groups, match.tables):
            table.blocks += self.pool.take(self._end(group, table.first, request.known) - len(table.blocks))
        request.num_blocks, request.diverges = demand.size, match.attended
        request.room = min(len(table.blocks) for table in match.tables) * self._block_size

    # ------------------------------------------------------------------------------- while it runs

    def grow(self, requests: Sequence[Request], tokens: Sequence[int]) -> list[NewBlock] | None:
        """Give running requests blocks for their first `tokens` tokens each, and release those behind their windows.

        Returns:
            The additions to their block tables, or None if too few blocks are free. They then get none.
        """
        self.trim_all(requests)
        size = self._block_size
        lacking, total = [], 0  # tables that are too short, and how many blocks all of them lack
        for index, group in enumerate(self.groups):
            for request, end in zip(requests, tokens):
                table, end = request.tables[index], -(-end // size)
                # A table without a window has had the blocks of all known tokens since the admission.
                if group.window is not None:
                    end = max(end, self._end(group, table.first, request.known))
                if (count := end - len(table.blocks)) > 0:
                    lacking.append((request, index, table.blocks, end))
                    total += count
        if total > self.pool.num_free:
            return None
        taken = iter(self.pool.take(total))
        added: list[NewBlock] = []
        for request, index, blocks, end in lacking:
            slot = request.slot
            request.num_blocks += end - len(blocks)
            for place in range(len(blocks), end):
                block = next(taken)
                blocks.append(block)
                added.append((slot, index, place, block))
            room = end
            for table in request.tables:
                if len(table.blocks) < room:
                    room = len(table.blocks)
            request.room = room * size
        return added

    def publish(self, requests: Sequence[Request], tokens: Sequence[int]) -> Sequence[int]:
        """Publish the blocks that the first `tokens` tokens of each request fill, all of which are known and computed.

        Returns:
            The blocks that are new to the cache.
        """
        size = self._block_size
        counts = [end // size for end in tokens]
        for request, full in zip(requests, counts):
            request.full_at = (full + 1) * size
        published = self.cache.publish(requests, counts)
        for request in requests:
            self.snapshots.settle(request)
        return published

    def trim(self, request: Request) -> None:
        """Release the blocks of a running request that no later row of it reads."""
        for index in self._windowed:
            table = request.tables[index]
            # With draft tokens in flight `computed` may shrink, but never below `known`.
            position = min(request.computed, request.known)
            first = self.groups[index].first_block(position, self._block_size)
            if first > table.first:
                self.pool.release(table.blocks[table.first : first])
                request.num_blocks -= first - table.first
                table.first = first

    def trim_all(self, requests: Iterable[Request]) -> None:
        """Trim several requests. Does nothing without a window, as in most models."""
        if self._windowed:
            for request in requests:
                self.trim(request)

    # ------------------------------------------------------------------------------- end

    def release(self, request: Request) -> None:
        """Release all blocks of a request. The prefix cache still finds those that are published."""
        self.pool.release(_by_position(request.tables))
        request.tables, request.num_blocks, request.room, request.full_at = [], 0, 0, 0
        self.snapshots.release(request)
        self.cache.restart(request)

    def withdraw(self, blocks: Iterable[int], copies: StateCopies) -> None:
        """Remove from the cache what a failed step was to write."""
        self.cache.withdraw(blocks)
        self.snapshots.withdraw(copies)

    def check(self, requests: Iterable[Request], pinned: Iterable[list[int]] = ()) -> None:
        """Check the books against all unfinished requests and the blocks that a connector holds.

        Raises:
            AssertionError: if they disagree.
        """
        requests = list(requests)
        self.pool.check([*(table.held for request in requests for table in request.tables), *pinned])
        self.snapshots.check(requests)
        for request in requests:
            assert request.num_blocks == sum(len(table.held) for table in request.tables), "miscounted blocks"
            assert request.status == "running" or not request.tables, "a waiting request holds blocks"
            for group, table in zip(self.groups, request.tables):
                position = min(request.computed, request.known)
                assert len(table.blocks) * self._block_size >= request.computed, "KV entries without a block"
                assert table.first <= group.first_block(position, self._block_size), (
                    "a block was released that the next token reads"
                )


def _by_position(tables: list[BlockTable]) -> list[int]:
    """Return the held blocks of all tables by position, so that in every group the end is evicted first."""
    if len(tables) == 1:
        return tables[0].held
    length = max((len(table.blocks) for table in tables), default=0)
    return [
        table.blocks[index]
        for index in range(length)
        for table in tables
        if table.first <= index < len(table.blocks)
    ]
