"""Movers: threads that copy blocks between the device, host memory and files, in the background.

Two lanes run side by side, each in the order of its orders: one copies in memory, the other one reads and writes files.
The scheduler half never asks for two copies at once that touch the same row or block, unless both are in one lane.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from quire.types import BlockKey, ConfigError, EngineInfo, TransferEnd, TransferOrder
from quire.worker.executor import DeviceGuard
from quire.worker.transfer.block_bytes import NO_SNAPSHOTS, BlockBytes, HostView, SnapshotBytes
from quire.worker.transfer.files import BlockFiles
from quire.worker.transfer.shared_memory import map_bytes


class BlockCopier(Protocol):
    """Copies between device blocks and host rows, on one kind of device."""

    rows: np.ndarray  # uint8 [rows, block bytes], the host memory

    def begin_save(self, blocks: list[int], rows: list[int]) -> Callable[[], None]:
        """Order the reading of device blocks into the stream of steps. Return what waits until the rows are written."""
        ...

    def begin_load(self, rows: list[int], blocks: list[int]) -> Callable[[], None]:
        """Order copies into device blocks after the steps launched so far. Return what runs and awaits them."""
        ...


class CpuCopier:
    """Copies on a CPU, where a block is read at once and written by the thread that calls the returned function.

    Args:
        blocks: the KV cache.
        rows: rows of host memory.
        row_bytes: bytes of a row; by default those of a block.
        snapshots: the pages of snapshots.
    """

    def __init__(
        self,
        blocks: BlockBytes,
        rows: int,
        row_bytes: int | None = None,
        snapshots: SnapshotBytes = NO_SNAPSHOTS,
    ) -> None:
        # numpy's zeros take memory from the operating system when it is first written.
        self.rows = np.zeros((rows, blocks.size if row_bytes is None else row_bytes), np.uint8)
        self.blocks = blocks
        self._view = HostView(blocks, snapshots)
        self._parts = [part.numpy() for part in blocks.parts]

    def begin_pull(self, peer: PeerBlocks, sources: list[int], blocks: list[int]) -> Callable[[], None]:
        """Return what copies blocks of another engine into blocks of this one."""

        def run() -> None:
            for part, other in zip(self._parts, peer.parts):
                for source, block in zip(sources, blocks):
                    part[block] = other[source]

        return run

    def begin_save(self, blocks: list[int], rows: list[int]) -> Callable[[], None]:
        for block, row in zip(blocks, rows):
            self._view.read(block, self.rows[row])
        return lambda: None

    def begin_load(self, rows: list[int], blocks: list[int]) -> Callable[[], None]:
        def run() -> None:
            for row, block in zip(rows, blocks):
                self._view.write(block, self.rows[row])

        return run


class PeerBlocks:
    """The blocks of a prefill engine, mapped into this process."""

    def __init__(self, blocks: BlockBytes, memory: int, info: EngineInfo) -> None:
        if len(info.shared_offsets) != len(blocks.parts) or info.block_bytes != blocks.size:
            raise ConfigError("a prefill engine has blocks of another layout than its decode engine")
        count = info.num_blocks + 1  # and the dummy block
        self.parts = [
            map_bytes(memory, offset, count * part.shape[1]).reshape(count, part.shape[1])
            for offset, part in zip(info.shared_offsets, blocks.parts)
        ]


class GpuCopier:
    """Copies between a GPU and pinned host memory on a stream beside that of the steps.

    A save first gathers its blocks into a buffer on the device, in the stream of steps, which takes a fraction of a
    millisecond. The way to the host, which takes longer, then overlaps with the steps. Loads use the same buffer in the
    other direction. The stream of steps waits for a copy only if a save finds the whole buffer in use.

    Args:
        blocks: the KV cache, on a GPU.
        rows: rows of host memory.
        row_bytes: bytes of a row, at least those of a block and of a page.
        buffer_rows: rows of the buffer on the device.
        device: the GPU.
        snapshots: the pages of snapshots.
    """

    def __init__(
        self,
        blocks: BlockBytes,
        rows: int,
        row_bytes: int,
        buffer_rows: int,
        device: torch.device,
        snapshots: SnapshotBytes = NO_SNAPSHOTS,
    ) -> None:
        self._host = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=True)
        self.rows = self._host.numpy()
        self._blocks, self._snapshots = blocks, snapshots
        self._out = torch.empty((buffer_rows, row_bytes), dtype=torch.uint8, device=device)
        self._in = torch.empty((buffer_rows, row_bytes), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._drained = torch.cuda.Event()  # the buffer of saves has been read
        self._drained.record(self._stream)

    @torch.inference_mode()
    def begin_save(self, blocks: list[int], rows: list[int]) -> Callable[[], None]:
        steps = torch.cuda.current_stream()
        for at in range(0, len(blocks), len(self._out)):
            chosen = blocks[at : at + len(self._out)]
            steps.wait_event(self._drained)
            self._gather(chosen)
            self._stream.wait_stream(steps)
            with torch.cuda.stream(self._stream):
                for place, row in enumerate(rows[at : at + len(chosen)]):
                    self._host[row].copy_(self._out[place], non_blocking=True)
            self._drained.record(self._stream)
        return self._mark()

    @torch.inference_mode()
    def begin_load(self, rows: list[int], blocks: list[int]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())  # steps in flight may still use the targets
        with torch.cuda.stream(self._stream):
            for at in range(0, len(rows), len(self._in)):
                chosen = rows[at : at + len(self._in)]
                for place, row in enumerate(chosen):
                    self._in[place].copy_(self._host[row], non_blocking=True)
                self._scatter(blocks[at : at + len(chosen)])
        return self._mark()

    def _split(self, numbers: list[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the blocks and the pages of snapshots in `numbers`, each with its place there."""
        first, both = self._snapshots.first, list(enumerate(numbers))
        return [one for one in both if one[1] < first], [one for one in both if one[1] >= first]

    def _index(self, pairs: list[tuple[int, int]]) -> torch.Tensor:
        """Return pairs of place and number on the device, int64 [2, pairs]."""
        return torch.tensor(list(zip(*pairs)), pin_memory=True).to(self._in.device, non_blocking=True)

    def _gather(self, numbers: list[int]) -> None:
        """Copy blocks and pages of snapshots into the first rows of the buffer of saves."""
        blocks, pages = self._split(numbers)
        if blocks:
            at, index = self._index(blocks)
            for part, where in self._blocks.slices():
                self._out[:, where].index_copy_(0, at, part.index_select(0, index))
        for place, page in pages:
            for piece, where in self._snapshots.pieces(page):
                self._out[place, where] = piece

    def _scatter(self, numbers: list[int]) -> None:
        """Copy the first rows of the buffer of loads into blocks and pages of snapshots."""
        blocks, pages = self._split(numbers)
        if blocks:
            at, index = self._index(blocks)
            for part, where in self._blocks.slices():
                part.index_copy_(0, index, self._in[:, where].index_select(0, at))
        for place, page in pages:
            for piece, where in self._snapshots.pieces(page):
                piece.copy_(self._in[place, where])

    def _mark(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event.synchronize


class LocalMover:
    """The mover of one rank.

    Args:
        copier: copies between device and host memory.
        guard: makes the device current in a thread.
        files: the disk tier of this rank, or None.
    """

    def __init__(
        self,
        copier: BlockCopier,
        guard: DeviceGuard,
        files: BlockFiles | None = None,
    ) -> None:
        self._copier, self._guard, self._files = copier, guard, files
        self._peers: dict[int, PeerBlocks] = {}
        self._ended: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self._on_end: Callable[[TransferEnd], None] = self._ended.put
        self._ready: list[TransferEnd] = []
        self._memory_lane, self._disk_lane = _Lane("kv-memory", guard), _Lane("kv-disk", guard)

    def start(self, orders: Sequence[TransferOrder]) -> None:
        for order in orders:
            match order.kind:
                case "save":
                    self._run(self._memory_lane, order, self._copier.begin_save(order.sources, order.targets))
                case "load":
                    self._run(self._memory_lane, order, self._copier.begin_load(order.sources, order.targets))
                case "write" | "read":
                    self._disk_lane.put(lambda order=order: self._on_end(self._use_files(order)))  # type: ignore[misc]
                case "pull":
                    peer, copier = self._peers[order.peer], self._copier
                    assert isinstance(copier, CpuCopier)
                    copy = copier.begin_pull(peer, order.sources, order.targets)
                    self._run(self._memory_lane, order, copy)

    def add_peer(self, number: int, memory: int, info: EngineInfo) -> None:
        """Map the blocks of prefill engine `number`, or those of the engine that has replaced it."""
        assert isinstance(self._copier, CpuCopier)
        self._peers[number] = PeerBlocks(self._copier.blocks, memory, info)

    def _run(self, lane: _Lane, order: TransferOrder, copy: Callable[[], None]) -> None:
        def work() -> None:
            copy()
            self._on_end(TransferEnd(order.ticket, []))

        lane.put(work)

    def _use_files(self, order: TransferOrder) -> TransferEnd:
        assert self._files is not None
        writes = order.kind == "write"
        rows, use = (order.sources, self._files.write) if writes else (order.targets, self._files.read)
        done = [use(key, self._copier.rows[row]) for key, row in zip(order.keys, rows)]
        return TransferEnd(order.ticket, [index for index, good in enumerate(done) if not good])

    def found(self) -> list[BlockKey]:
        """Return the keys of the files that exist, oldest first."""
        return [] if self._files is None else self._files.found()

    def report_to(self, on_end: Callable[[TransferEnd], None]) -> None:
        """Call `on_end` with each end, in one of the threads, instead of keeping it for `ended`."""
        self._on_end = on_end

    def drop(self, keys: Sequence[BlockKey]) -> None:
        if (files := self._files) is not None:
            for key in keys:
                self._disk_lane.put(partial(files.drop, key))

    def ended(self) -> list[TransferEnd]:
        self._memory_lane.check()
        self._disk_lane.check()
        ends, self._ready = self._ready, []
        with contextlib.suppress(queue.Empty):
            while True:
                ends.append(self._ended.get_nowait())
        return ends

    def wait(self, timeout_s: float) -> None:
        if not self._ready:
            with contextlib.suppress(queue.Empty):
                self._ready.append(self._ended.get(timeout=timeout_s))

    def close(self) -> None:
        for lane in (self._memory_lane, self._disk_lane):
            lane.close()
        if self._files is not None:
            self._files.close()


class _Lane:
    """A thread that runs functions in order. Its first error is raised by `check`."""

    def __init__(self, name: str, guard: DeviceGuard) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(guard,), daemon=True, name=name)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Skip what has not begun, and wait for the end of the thread."""
        self._closed = True
        self._work.put(None)
        self._thread.join()

    def _run(self, guard: DeviceGuard) -> None:
        try:
            with guard():
                while (work := self._work.get()) is not None:
                    if not self._closed:
                        work()
        except BaseException as error:
            self._error = error
