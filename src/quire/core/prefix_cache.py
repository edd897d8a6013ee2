"""The prefix cache: full blocks are found again by the hash of everything up to their end.

A page's name is blake2b(name of the page before it, its token ids), keyed with a secret of this process,
so that neither a collision nor a crafted prompt can make one request read another's blocks. Blocks are
published when their step is *scheduled*: the scheduler runs a reader in a later step, which comes after it in
stream order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from quire.core.block_pool import BlockPool
from quire.types import Request


class PrefixCache(Protocol):
    def match(self, request: Request) -> list[int]:
        """Cached blocks that hold the beginning of the request, at most up to its last token but one."""
        ...

    def publish(self, request: Request) -> Sequence[int]:
        """Offer the full blocks of the request that are computed and whose tokens are known.

        Return those that were not offered before.
        """
        ...

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Forget blocks that `publish` returned: what they should hold was never written."""
        ...

    def forget(self, request: Request) -> None:
        """Un-publish what the request computed: nobody finds these blocks any more."""
        ...

    def end_of_match(self, request: Request, hits: int) -> str:
        """Why `match` found `hits` blocks and no more: "end" (it found all full blocks), "new" (this block was
        not seen before), "evicted" (it was, and had to make room), or what keeps the cache from being used:
        "off", "prompt_logprobs", "pooling"."""
        ...


def _needs_all(request: Request) -> str:
    """What keeps a request from using cached tokens: their scores, or hidden states, would be missing."""
    if request.params.prompt_logprobs is not None:
        return "prompt_logprobs"
    return "pooling" if request.source.pooling == "mean" else ""


class NoPrefixCache:
    """Off: nothing is found, nothing is kept."""

    def match(self, request: Request) -> list[int]:
        return []

    def publish(self, request: Request) -> Sequence[int]:
        request.publish_at = 1 << 62
        return ()

    def withdraw(self, blocks: Iterable[int]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def end_of_match(self, request: Request, hits: int) -> str:
        return "off"


class HashPrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._evicted: dict[bytes, None] = {}  # names given up lately, as many as there are blocks
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
            if name is not None:  # None: forgotten with its request in the meantime
                del self._block_of[name]
                self._pool.uncache(block)

    def forget(self, request: Request) -> None:
        # What was there when it was first admitted is others' work, and so are blocks that it does not hold. A
        # preempted request holds none; then all its names go.
        own = set(request.blocks)
        for name in request.names[max(request.cached, 0) // self._block_size :]:
            block = self._block_of.get(name)
            if block is not None and (block in own or not own):
                del self._block_of[name], self._name_of[block]
                self._pool.uncache(block)
        request.publish_at = 1 << 62

    def _extend(self, request: Request, full: int) -> None:
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
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._evicted.pop(name, None)  # to the end of the line
        self._evicted[name] = None
        if len(self._evicted) > self._pool.num_blocks:
            del self._evicted[next(iter(self._evicted))]
