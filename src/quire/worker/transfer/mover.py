"""Movers: threads that copy blocks between the device, host memory and files, in the background.

Two lanes run side by side, each in the order of its orders: one copies in memory, the other one reads and writes files.
The scheduler half never asks for two copies at once that touch the same row or block, unless both are in one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from quire.types import BlockKey, TransferEnd, TransferOrder
from quire.worker.executor import DeviceGuard
from quire.worker.transfer.block_bytes import NO_SNAPSHOTS, BlockBytes, HostView, SnapshotBytes
from quire.worker.transfer.files import BlockFiles
from quire.worker.transfer.lane import Ends, Lane


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
        self._view = HostView(blocks, snapshots)

    def begin_save(self, blocks: list[int], rows: list[int]) -> Callable[[], None]:
        for block, row in zip(blocks, rows):
            self._view.read(block, self.rows[row])
        return lambda: None

    def begin_load(self, rows: list[int], blocks: list[int]) -> Callable[[], None]:
        def run() -> None:
            for row, block in zip(rows, blocks):
                self._view.write(block, self.rows[row])

        return run


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
        self._ends = Ends()
        self._on_end: Callable[[TransferEnd], None] = self._ends.put
        self._memory_lane, self._disk_lane = Lane("kv-memory", guard), Lane("kv-disk", guard)

    def start(self, orders: Sequence[TransferOrder]) -> None:
        for order in orders:
            match order.kind:
                case "save":
                    self._run(self._memory_lane, order, self._copier.begin_save(order.sources, order.targets))
                case "load":
                    self._run(self._memory_lane, order, self._copier.begin_load(order.sources, order.targets))
                case "write" | "read":
                    self._disk_lane.put(lambda order=order: self._on_end(self._use_files(order)))  # type: ignore[misc]

    def _run(self, lane: Lane, order: TransferOrder, copy: Callable[[], None]) -> None:
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
        return self._ends.take()

    def wait(self, timeout_s: float) -> None:
        self._ends.wait(timeout_s)

    def close(self) -> None:
        for lane in (self._memory_lane, self._disk_lane):
            lane.close()
        if self._files is not None:
            self._files.close()
