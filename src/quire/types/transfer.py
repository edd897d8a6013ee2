"""The interface between the scheduler half and the worker half of KV transfers: orders to copy blocks, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

BlockKey = tuple[int, bytes]  # group of layers, and name of a block (core/prefix_cache.py)

# save: device block -> host row        write: host row -> file
# load: host row -> device block        read: file -> host row
# pull: block of a peer -> device block
TransferKind = Literal["save", "load", "write", "read", "pull"]


@dataclass(slots=True)
class TransferOrder:
    """Copies of whole blocks that end together.

    Copy i is from `sources[i]` to `targets[i]`. Both are numbers: of device blocks, of host rows, or of a peer's blocks.
    For files, which are named by `keys[i]`, the number on their side is 0.
    """

    ticket: int
    kind: TransferKind
    sources: list[int]
    targets: list[int]
    keys: list[BlockKey] = field(default_factory=list)
    peer: int = 0  # of which engine the sources are, for "pull"


class TransferEnd(NamedTuple):
    """The end of an order: the indices of the copies that failed, whose targets are undefined."""

    ticket: int
    failed: list[int]


@dataclass(slots=True)
class SharedTensor:
    """One tensor of blocks: what is kept of a block, and where another process finds the first one."""

    dtype: str
    block_bytes: int
    handle: bytes = b""  # of an allocation on a GPU; empty for the file that both processes have
    offset: int = 0  # bytes from the begin of the allocation or file


@dataclass(slots=True)
class SharedBlocks:
    """The description of the blocks of an engine for a process that copies them."""

    transport: str
    block_size: int
    groups: list[tuple[int, int | None]]  # number of layers, and window or None
    num_blocks: int  # with the dummy block
    tensors: list[SharedTensor]

    def differences(self, other: SharedBlocks | None) -> list[str]:
        """Return a text for each field in which the layout of `other` differs; numbers of blocks may differ."""
        if other is None:
            return ["transport is none"]

        def fields(blocks: SharedBlocks) -> dict[str, object]:
            whole = {name: getattr(blocks, name) for name in ("transport", "block_size", "groups")}
            parts = {
                name: [getattr(one, name) for one in blocks.tensors] for name in ("dtype", "block_bytes")
            }
            return whole | parts

        theirs = fields(other)
        return [
            f"{name} is {theirs[name]} instead of {ours}"
            for name, ours in fields(self).items()
            if theirs[name] != ours
        ]


class PrefillNews(NamedTuple):
    """What has become of a request at a prefill engine: blocks that can be read, and whether more will come.

    If it `failed` there, its blocks may hold NaN, those reported earlier too.
    """

    request_id: str
    exported: Sequence[
        tuple[int, int, list[int]]
    ] = ()  # group, place of the first block, blocks of that engine
    ended: bool = False
    failed: bool = False


class BlockMover(Protocol):
    """The worker half of KV transfers: it copies blocks in the background, on every rank its part of them.

    Copies of "save" are ordered between the steps launched before `start` and those launched after it. All other copies
    have targets that no step uses, and may end at any time.
    """

    def start(self, orders: Sequence[TransferOrder]) -> None:
        """Begin to copy."""
        ...

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Delete files."""
        ...

    def ended(self) -> list[TransferEnd]:
        """Return the orders that have ended since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until an order ends, at most `timeout_s` seconds."""
        ...

    def close(self) -> None:
        """Stop copying. Orders in flight may be abandoned."""
        ...
