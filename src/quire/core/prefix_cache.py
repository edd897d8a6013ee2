"""The prefix cache, which finds full blocks by a hash of all tokens up to their end.

The name of a block is blake2b(name of the block before it, its token ids), keyed with a secret of this process. So
neither a collision nor a crafted prompt can make one request read the blocks of another. Blocks are published when
their step is *scheduled*: a request that finds them runs in a later step, which follows in stream order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from quire.core.block_pool import BlockPool
from quire.types import Request


class PrefixCache(Protocol):
    """A map from token prefixes to blocks. It owns the fields of `Request` that say what has been published."""

    def match(self, request: Request) -> list[int]:
        """Return the cached blocks that hold the beginning of a request, without its last token."""
        ...

    def publish(self, request: Request) -> Sequence[int]:
        """Publish the full blocks of a request that are computed and whose tokens are known.

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

    def end_of_match(self, request: Request, hits: int) -> str:
        """Return why `match` found `hits` blocks and no more.

        Returns:
            "end" if it found all full blocks, "new" if the next block has not been seen before, "evicted" if it has
            been evicted, or the reason why the request cannot use the cache: "off", "prompt_logprobs" or "pooling".
        """
        ...


def _needs_all(request: Request) -> str:
    """Return why a request cannot use cached tokens, or "": it needs their log-probabilities or hidden states."""
    if request.params.prompt_logprobs is not None:
        return "prompt_logprobs"
    return "pooling" if request.source.pooling == "mean" else ""


class NoPrefixCache:
    """A `PrefixCache` that is always empty."""

    def match(self, request: Request) -> list[int]:
        return []

    def publish(self, request: Request) -> Sequence[int]:
        request.publish_at = 1 << 62
        return ()

    def withdraw(self, blocks: Iterable[int]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def restart(self, request: Request) -> None:
        pass

    def end_of_match(self, request: Request, hits: int) -> str:
        return "off"


class HashPrefixCache:
    """A `PrefixCache` over the blocks of `pool`, whose free blocks it can still find until they are evicted."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._evicted: dict[bytes, None] = {}  # the latest evicted names, at most one per block
        self._secret = os.urandom(32)
        pool.on_evict(self._forget)

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, request: Request) -> list[int]:
        if _needs_all(request):
            return []
        full = (request.known - 1) // self._block_size
        self._extend(request, full)
        found = []
        for name in request.names[:full]:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, request: Request) -> Sequence[int]:
        full = min(request.computed, request.known) // self._block_size
        self._extend(request, full)
        published = []
        for index in range(request.published, full):
            name, block = request.names[index], request.blocks[index]
            if name not in self._block_of:
                self._block_of[name] = block
                self._name_of[block] = name
                self._pool.cached[block] = 1
                published.append(block)
        request.published = full
        request.publish_at = (full + 1) * self._block_size
        return published

    def withdraw(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            name = self._name_of.pop(block, None)
            if name is not None:  # None: `forget` removed it with its request
                del self._block_of[name]
                self._pool.uncache(block)

    def forget(self, request: Request) -> None:
        # Other requests computed the blocks found at the first admission, and those that it does not hold. A
        # preempted request holds no blocks; then all its names are removed.
        own = set(request.blocks)
        for name in request.names[max(request.cached, 0) // self._block_size :]:
            block = self._block_of.get(name)
            if block is not None and (block in own or not own):
                del self._block_of[name], self._name_of[block]
                self._pool.uncache(block)
        request.publish_at = 1 << 62

    def restart(self, request: Request) -> None:
        request.published = request.publish_at = 0

    def _extend(self, request: Request, full: int) -> None:
        """Compute the names of the first `full` blocks of a request."""
        names, size = request.names, self._block_size
        while len(names) < full:
            start = len(names) * size
            parent = names[-1] if names else request.source.cache_salt.encode()
            tokens = request.tokens[start : start + size].tobytes()
            names.append(blake2b(parent + b"|" + tokens, digest_size=16, key=self._secret).digest())

    def end_of_match(self, request: Request, hits: int) -> str:
        if reason := _needs_all(request):
            return reason
        if hits >= (request.known - 1) // self._block_size:
            return "end"
        return "evicted" if request.names[hits] in self._evicted else "new"

    def _forget(self, block: int) -> None:
        """Remove a block that the pool evicts, and remember its name."""
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._evicted.pop(name, None)  # moves the name to the end of the order
        self._evicted[name] = None
        if len(self._evicted) > self._pool.num_blocks:
            del self._evicted[next(iter(self._evicted))]
