"""Peers: the blocks of prefill engines, and the mover that copies them into the blocks of a decode engine.

How a peer's blocks become readable is the business of a transport: files in memory (shared_memory.py) or handles of GPU
memory (cuda_ipc.py). A transport has two sides. The prefill engine describes its blocks with a `BlockExports`, the decode
engine opens them with a `PeerReader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.types import BlockKey, ConfigError, SharedBlocks, SharedTensor, TransferEnd, TransferOrder
from quire.worker.executor import DeviceGuard
from quire.worker.transfer.block_bytes import BlockBytes
from quire.worker.transfer.lane import Ends, Lane
from quire.worker.transfer.shared_memory import SharedMemory


class BlockExports(Protocol):
    """The side of a transport that shows blocks."""

    @property
    def memory(self) -> SharedMemory | None:
        """Return the memory from which the KV cache must be allocated, or None for any memory of the device."""
        ...

    def place(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the memory at an address of this process, and the offset of the address in it."""
        ...


class PeerBlocks(Protocol):
    """The blocks of one prefill engine, readable in this process."""

    def begin_pull(self, sources: list[int], blocks: list[int]) -> Callable[[], None]:
        """Order copies of the peer's blocks `sources` into `blocks`. Return what runs or awaits them."""
        ...

    def close(self) -> None:
        """Give up the peer's memory. No copy is in flight."""
        ...


class PeerReader(Protocol):
    """The side of a transport that reads blocks."""

    def open(self, memory: int, shared: SharedBlocks) -> PeerBlocks:
        """Make the blocks of an engine readable.

        Args:
            memory: descriptor of the file that both processes have.
            shared: the description that the engine has sent.

        Raises:
            ConfigError: if the memory cannot be opened.
        """
        ...


def describe_blocks(
    transport: str,
    blocks: BlockBytes,
    block_size: int,
    groups: Sequence[tuple[int, int | None]],
    exports: BlockExports | None = None,
) -> SharedBlocks:
    """Return the description of the blocks of an engine, with their places if it exports them."""
    places = [(b"", 0) if exports is None else exports.place(part.data_ptr()) for part in blocks.parts]
    tensors = [
        SharedTensor(dtype, part.shape[1], handle, offset)
        for dtype, part, (handle, offset) in zip(blocks.dtypes, blocks.parts, places)
    ]
    return SharedBlocks(transport, block_size, [*groups], len(blocks), tensors)


class PeerMover:
    """The worker half of the connector of a decode engine.

    Orders run in the order in which they are given. A peer that is dropped is closed behind the copies from it.

    Args:
        own: the description of the blocks of this engine.
        reader: the transport.
        guard: makes the device current in a thread.
    """

    def __init__(self, own: SharedBlocks, reader: PeerReader, guard: DeviceGuard) -> None:
        self._own, self._reader = own, reader
        self._peers: dict[int, PeerBlocks] = {}
        self._ends, self._lane = Ends(), Lane("kv-peers", guard)

    def add_peer(self, number: int, memory: int, shared: SharedBlocks | None) -> None:
        """Open the blocks of prefill engine `number`, or those of the engine that has replaced it.

        Raises:
            ConfigError: if they have another layout than the blocks of this engine, or cannot be opened.
        """
        if differences := self._own.differences(shared):
            raise ConfigError(
                f"prefill engine {number} has blocks of another layout than its decode engine: "
                + ", ".join(differences)
            )
        assert shared is not None
        self.drop_peer(number)
        self._peers[number] = self._reader.open(memory, shared)

    def drop_peer(self, number: int) -> None:
        """Close the blocks of a prefill engine that has ended, so that their memory is free for its replacement."""
        if peer := self._peers.pop(number, None):
            self._lane.put(peer.close)

    def start(self, orders: Sequence[TransferOrder]) -> None:
        for order in orders:
            self._lane.put(self._work(order))

    def _work(self, order: TransferOrder) -> Callable[[], None]:
        if (peer := self._peers.get(order.peer)) is None:
            return lambda: self._ends.put(TransferEnd(order.ticket, [*range(len(order.sources))]))
        copy = peer.begin_pull(order.sources, order.targets)

        def work() -> None:
            copy()
            self._ends.put(TransferEnd(order.ticket, []))

        return work

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Do nothing: there are no files."""

    def ended(self) -> list[TransferEnd]:
        self._lane.check()
        return self._ends.take()

    def wait(self, timeout_s: float) -> None:
        self._ends.wait(timeout_s)

    def close(self) -> None:
        for number in list(self._peers):
            self.drop_peer(number)
        self._lane.close(skip=False)  # memory may be unmapped only behind the copies from it
