"""The prefix cache, which finds full blocks by a hash of all tokens up to their end.

Blocks are found by their names (types/block_names.py). They are published when their step is *scheduled*: a request
that finds them runs in a later step, which follows in stream order.

Groups of layers (types/kv.py) have their own blocks under the same names. A match is the longest prefix that all groups
can serve. A group with a window needs only the last blocks of it. Layers with a state need a snapshot at its end
(snapshots.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

from quire.core.block_pool import BlockPool
from quire.core.cache_journal import CacheJournal, NoJournal
from quire.core.snapshots import NoSnapshots, Snapshots
from quire.types import BlockKey, BlockTable, KVGroup, Request
from quire.types.block_names import BlockNames, new_secret


class PrefixMatch(NamedTuple):
    """The cached beginning of a request."""

    tokens: int
    tables: list[BlockTable]  # by group, each with tokens / block_size entries
    blocks: list[int]  # the blocks of all groups that hold it
    attended: int = 0  # tokens that the blocks alone would serve; states may be missing for the last of them


class PrefixCache(Protocol):
    """A map from token prefixes to blocks. It owns the fields of `Request` that say what has been published."""

    def match(self, request: Request) -> PrefixMatch:
        """Return the longest cached prefix of a request, without its last token."""
        ...

    def publish(self, requests: Sequence[Request], counts: Sequence[int]) -> Sequence[int]:
        """Publish the first `counts` blocks of each request, as far as it holds them.

        Returns:
            The blocks that are new to the cache.
        """
        ...

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Remove blocks that `publish` returned and whose contents were never written."""
        ...

    def forget(self, request: Request) -> None:
        """Remove the blocks that the request itself computed."""
        ...

    def restart(self, request: Request) -> None:
        """Reset the publishing of a request that has been preempted and will be computed again."""
        ...

    def end_of_match(self, request: Request, tokens: int) -> str:
        """Return why `match` found `tokens` tokens and no more.

        Returns:
            "end" if it found all full blocks, "new" if the next block has not been seen before, "evicted" if it has
            been evicted, "state" if there is no snapshot of the states behind it, or the reason why the request cannot use the cache: "off", "prompt_logprobs" or "pooling".
        """
        ...


def _needs_all(request: Request) -> str:
    """Return why a request cannot use cached tokens, or "": it needs their log-probabilities or hidden states."""
    if request.params.prompt_logprobs is not None:
        return "prompt_logprobs"
    return "pooling" if request.source.pooling == "mean" else ""


class NoPrefixCache:
    """A `PrefixCache` that is always empty, for `groups` groups."""

    def __init__(self, groups: int = 1) -> None:
        self._groups = groups

    def match(self, request: Request) -> PrefixMatch:
        return PrefixMatch(0, [BlockTable([]) for _ in range(self._groups)], [])

    def publish(self, requests: Sequence[Request], counts: Sequence[int]) -> Sequence[int]:
        return ()

    def withdraw(self, blocks: Iterable[int]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def restart(self, request: Request) -> None:
        pass

    def end_of_match(self, request: Request, tokens: int) -> str:
        return "off"


class _Elsewhere:
    """The names of one group that are in the cache or, by `also`, in another place."""

    def __init__(self, group: int, have: Container[bytes], also: Callable[[int, bytes], bool]) -> None:
        self._group, self._have, self._also = group, have, also

    def __contains__(self, name: object) -> bool:
        return name in self._have or (isinstance(name, bytes) and self._also(self._group, name))


class HashPrefixCache:
    """A `PrefixCache` over the blocks of `pool`, whose free blocks it can still find until they are evicted."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        groups: Sequence[KVGroup] = (KVGroup(),),
        secret: bytes | None = None,
        journal: CacheJournal | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Start empty.

        Args:
            pool: the blocks.
            block_size: tokens per block.
            groups: the groups of layers.
            secret: key of the names; None picks one.
            journal: is told what the first group holds, which has all tokens if any group has.
            snapshots: those of the states of layers that need one to go on; None if no layer does.
        """
        self._pool, self._snapshots = pool, snapshots or NoSnapshots()
        self._block_size = block_size
        self._groups = groups
        self._whole = [index for index, group in enumerate(groups) if group.window is None]
        self._windowed = [index for index, group in enumerate(groups) if group.window is not None]
        self._block_of: list[dict[bytes, int]] = [{} for _ in groups]
        self._place_of: dict[int, tuple[int, bytes]] = {}  # block -> its group and name
        # The latest evicted names, at most one per block. A dict would take longer and longer to find its first entry.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._naming = BlockNames(block_size, secret or new_secret())
        self._journal = journal or NoJournal()
        self._told = self._whole[0] if self._whole else 0  # the group whose changes the journal has
        self._evicting: Callable[[int, bytes, int], None] = lambda group, name, block: None
        self._distrusting: Callable[[int, bytes], None] = lambda group, name: None
        pool.on_evict(self._forget)

    def __len__(self) -> int:
        return len(self._place_of)

    def watch(
        self, evicting: Callable[[int, bytes, int], None], distrusting: Callable[[int, bytes], None]
    ) -> None:
        """Set the functions to call when a block is evicted, and when the contents under a name are not to be trusted.

        The first gets group, name and block; the block's contents are overwritten in the next step. The second gets
        group and name.
        """
        self._evicting, self._distrusting = evicting, distrusting

    def match(self, request: Request) -> PrefixMatch:
        length, attended = self._longest(request, self._block_of)
        names = request.names
        tables, blocks = [], []
        for group, have in zip(self._groups, self._block_of):
            first = group.first_block(length * self._block_size, self._block_size)
            found = [have[name] for name in names[first:length]]
            blocks += found
            tables.append(BlockTable([0] * first + found, first))
        return PrefixMatch(length * self._block_size, tables, blocks, attended * self._block_size)

    def reach(
        self, request: Request, elsewhere: Callable[[int, bytes], bool], snapshots: Callable[[bytes], bool]
    ) -> int:
        """Return the number of blocks of the longest prefix of a request that the cache and another place can serve.

        Args:
            request: the request.
            elsewhere: returns whether the other place has the block of a group and a name.
            snapshots: returns whether it has the snapshot of a name.
        """
        have = [_Elsewhere(group, names, elsewhere) for group, names in enumerate(self._block_of)]
        return self._longest(request, have, snapshots)[0]

    def first_blocks(self, length: int) -> list[int]:
        """Return, by group, the first of the blocks that are needed to continue behind the first `length` blocks."""
        size = self._block_size
        return [group.first_block(length * size, size) for group in self._groups]

    def block_of(self, group: int, name: bytes) -> int | None:
        """Return the block of a group with this name, or None."""
        return self._block_of[group].get(name)

    def insert(self, key: BlockKey, block: int) -> bool:
        """Publish a held block that was filled from elsewhere. Return False if the name is in use."""
        group, name = key
        if name in self._block_of[group]:
            return False
        self._block_of[group][name] = block
        self._place_of[block] = key
        self._pool.cached[block] = 1
        if group == self._told:
            self._journal.add(name)
        return True

    def _longest(
        self,
        request: Request,
        haves: Sequence[Container[bytes]],
        snapshots: Callable[[bytes], bool] = lambda name: False,
    ) -> tuple[int, int]:
        """Return the number of blocks of the longest prefix that `haves`, by group, can serve.

        `snapshots` returns whether another place has the snapshot of a name.

        Returns:
            The number with a snapshot of the states at the end, and without.
        """
        length = 0 if _needs_all(request) else (request.known - 1) // self._block_size
        names = request.names
        self._naming.extend(names, request.source.cache_salt, request.tokens, length)
        for index in self._whole:
            have, end = haves[index], 0
            while end < length and names[end] in have:
                end += 1
            length = end
        attended = length = self._windows_serve(haves, names, length)
        while (end := self._snapshots.longest(names, length, snapshots)) != length:
            length = self._windows_serve(haves, names, end)
        return length, attended

    def _windows_serve(self, haves: Sequence[Container[bytes]], names: list[bytes], length: int) -> int:
        """Return the most blocks, at most `length`, of which every group with a window has those in its window."""
        settled = 0  # groups in a row that serve `length`
        while length and settled < len(self._windowed):
            for index in self._windowed:
                served = self._window_serves(index, haves[index], names, length)
                settled = settled + 1 if served == length else 1
                length = served
        return length

    def _window_serves(self, index: int, have: Container[bytes], names: list[bytes], length: int) -> int:
        group, size = self._groups[index], self._block_size
        at = length  # the group has the blocks [at, length)
        first = group.first_block(length * size, size)
        while at > first:
            at -= 1
            if names[at] not in have:  # no prefix that ends behind this block can be served
                length = at
                first = group.first_block(length * size, size)
        return length

    def publish(self, requests: Sequence[Request], counts: Sequence[int]) -> Sequence[int]:
        extend, place_of, cached = self._naming.extend, self._place_of, self._pool.cached
        published: list[int] = []
        for request, count in zip(requests, counts):
            names = request.names
            extend(names, request.source.cache_salt, request.tokens, count)
            for group, table in enumerate(request.tables):
                have = self._block_of[group]
                for index in range(max(request.published, table.first), count):
                    name = names[index]
                    if name not in have:
                        block = have[name] = table.blocks[index]
                        place_of[block] = group, name
                        cached[block] = 1
                        published.append(block)
                        if group == self._told:
                            self._journal.add(name)
            request.published = count
        return published

    def withdraw(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._place_of:  # otherwise `forget` removed it with its request
                self._remove(block)

    def forget(self, request: Request) -> None:
        # Other requests computed the blocks found at the first admission, and those that it does not hold, unless
        # they are behind a window. A preempted request holds no blocks; then all its names are removed.
        own = set(request.held_blocks())
        start = max(request.cached, 0) // self._block_size
        for name in request.names[start:]:
            self._snapshots.drop(name)
        for group, have in enumerate(self._block_of):
            behind = request.tables[group].first if request.tables else 0
            for index in range(start, len(request.names)):
                self._distrusting(group, request.names[index])
                block = have.get(request.names[index])
                if block is not None and (block in own or index < behind or not own):
                    self._remove(block)

    def restart(self, request: Request) -> None:
        request.published = 0

    def _remove(self, block: int) -> None:
        self._unname(block)
        self._pool.uncache(block)

    def _unname(self, block: int) -> bytes:
        """Remove a block from the maps. Return the name that it had."""
        group, name = self._place_of.pop(block)
        del self._block_of[group][name]
        if group == self._told:
            self._journal.remove(name)
        return name

    def end_of_match(self, request: Request, tokens: int) -> str:
        if reason := _needs_all(request):
            return reason
        hits = tokens // self._block_size
        if hits >= (request.known - 1) // self._block_size:
            return "end"
        if request.diverges > tokens:
            return "state"
        name = request.names[hits]
        seen = name in self._evicted or any(name in have for have in self._block_of)
        return "evicted" if seen else "new"  # of some groups only, if one still has it

    def _forget(self, block: int) -> None:
        """Remove a block that the pool evicts, and remember its name."""
        group, name = self._place_of[block]
        self._evicting(group, name, block)
        self._unname(block)
        if group in self._whole:  # a group with a window may not need this block
            self._snapshots.evict(name)
        self._evicted[name] = None
        self._evicted.move_to_end(name)
        if len(self._evicted) > self._pool.num_blocks:
            self._evicted.popitem(last=False)
