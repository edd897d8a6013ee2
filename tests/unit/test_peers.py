"""Blocks of another process, by handles of its memory: they arrive, whatever happens to that process meanwhile."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ipc_peer
from ipc_peer import BLOCKS, FileHandles, description, expected, make_layers
from quire.types import ConfigError, SharedBlocks, TransferEnd, TransferOrder
from quire.worker.executor import device_guard
from quire.worker.transfer.block_bytes import BlockBytes
from quire.worker.transfer.cuda_ipc import CudaHandles, IpcReader, MemoryHandles
from quire.worker.transfer.peers import PeerMover

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["fake", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
FIELDS: dict[str, Any] = {"transport": "shared-memory", "block_size": 32, "groups": [(1, None), (1, 64)]}


class MemoryCopy:
    """The kernel's function on a CPU, where an address is an address."""

    def __init__(self, sources: list[int], targets: list[int], sizes: list[int]) -> None:
        self._tensors = list(zip(sources, targets, sizes))

    def __call__(self, blocks: torch.Tensor) -> None:
        for source, target, size in self._tensors:
            for theirs, ours in blocks.T.tolist():
                ctypes.memmove(target + ours * size, source + theirs * size, size)


class DecodeSide:
    """The mover of a decode engine, its blocks and the driver that it uses. Copies begin when `gate` is set."""

    def __init__(self, device: str, folder: Path) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.layers = make_layers(device, FileHandles(folder) if device == "fake" else None)
        blocks, self.handles = BlockBytes(self.layers), self._handles(device, folder)
        self.parts = blocks.parts
        self.mover = PeerMover(
            description(self.layers, None),
            self._reader(device, blocks),
            device_guard(torch.device("cpu" if device == "fake" else device)),
        )

    def _handles(self, device: str, folder: Path) -> MemoryHandles:
        return FileHandles(folder) if device == "fake" else CudaHandles(torch.device(device))

    def _reader(self, device: str, blocks: BlockBytes) -> IpcReader:
        if device == "fake":
            return IpcReader(blocks, self.handles, MemoryCopy, self._begin)
        from quire.assembly.transport import open_reader

        reader = open_reader("cuda-ipc", blocks, torch.device(device))
        assert isinstance(reader, IpcReader)
        return reader

    def _begin(self, copy: Callable[[torch.Tensor], None], sources: list[int], blocks: list[int]) -> Any:
        def run() -> None:
            assert self.gate.wait(10)
            copy(torch.tensor([sources, blocks]))

        return run

    def pull(self, ticket: int, sources: list[int], targets: list[int]) -> None:
        self.mover.start([TransferOrder(ticket, "pull", sources, targets)])

    def ended(self, count: int) -> list[TransferEnd]:
        found, end_s = [], time.monotonic() + 10
        while len(found) < count:
            assert time.monotonic() < end_s, "a copy does not end"
            self.mover.wait(0.05)
            found += self.mover.ended()
        return found

    def holds(self, pairs: dict[int, int]) -> bool:
        """Return whether the targets hold the peer's blocks, and all other blocks are untouched."""
        return all(
            bool((part[block] == (expected(number, pairs[block]) if block in pairs else 0)).all())
            for number, part in enumerate(self.parts)
            for block in range(BLOCKS)
        )


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def decode(device: str, tmp_path: Path) -> Iterator[DecodeSide]:
    side = DecodeSide(device, tmp_path)
    yield side
    side.gate.set()
    side.mover.close()
    assert not getattr(side.handles, "opened", None), "memory of a peer is still mapped"


@pytest.fixture
def peer(device: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], SharedBlocks]]:
    process = subprocess.Popen(
        [sys.executable, ipc_peer.__file__, device, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    yield process, msgspec.msgpack.decode(bytes.fromhex(line), type=SharedBlocks)
    process.kill()
    process.communicate()


def test_blocks_arrive_and_survive_the_death_of_their_process(decode: DecodeSide, peer: Any) -> None:
    process, shared = peer
    handles = {tensor.handle for tensor in shared.tensors}
    assert all(len(handle) == 64 for handle in handles)
    decode.mover.add_peer(0, -1, shared)
    decode.pull(1, [7, 0, 11], [3, 9, 0])
    assert decode.ended(1) == [TransferEnd(1, [])] and decode.holds({3: 7, 9: 0, 0: 11})
    for ticket in range(2, 20):  # in flight while the process dies
        decode.pull(ticket, [ticket % BLOCKS], [4])
    process.send_signal(signal.SIGKILL)
    process.wait()
    decode.pull(20, [5, 6], [1, 4])
    assert [end.failed for end in decode.ended(19)] == [[]] * 19
    assert decode.holds({3: 7, 9: 0, 0: 11, 1: 5, 4: 6})
    decode.mover.drop_peer(0)
    decode.pull(21, [1, 2], [5, 6])
    assert decode.ended(1) == [TransferEnd(21, [0, 1])], "there is nothing to copy from"


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[tuple[DecodeSide, SharedBlocks]]:
    """A decode side and the description of a prefill side in this process."""
    handles = FileHandles(tmp_path)
    side, theirs = DecodeSide("fake", tmp_path), make_layers("fake", handles)
    for number, part in enumerate(BlockBytes(theirs).parts):
        for block in range(BLOCKS):
            part[block] = expected(number, block)
    yield side, description(theirs, handles)
    side.gate.set()
    side.mover.close()


def opened(side: DecodeSide) -> int:
    assert isinstance(side.handles, FileHandles)
    return len(side.handles.opened)


def test_memory_is_unmapped_behind_the_copies_from_it(fake: tuple[DecodeSide, SharedBlocks]) -> None:
    side, shared = fake
    side.mover.add_peer(0, -1, shared)
    assert opened(side) == 2, "tensors of one allocation share its mapping"
    side.gate.clear()
    side.pull(1, [1, 2], [3, 4])
    side.mover.drop_peer(0)
    side.mover.add_peer(0, -1, shared)  # the replacement
    side.pull(2, [5], [6])
    time.sleep(0.05)
    assert opened(side) == 4 and side.mover.ended() == []
    side.gate.set()
    assert [end.ticket for end in side.ended(2)] == [1, 2] and side.holds({3: 1, 4: 2, 6: 5})
    assert opened(side) == 2


def test_closing_waits_for_the_copies_in_flight(fake: tuple[DecodeSide, SharedBlocks]) -> None:
    side, shared = fake
    side.mover.add_peer(0, -1, shared)
    side.gate.clear()
    side.pull(1, [1], [3])
    threading.Timer(0.05, side.gate.set).start()
    side.mover.close()
    assert side.holds({3: 1}) and opened(side) == 0


def test_an_allocation_that_cannot_be_opened_leaves_no_other_mapped(
    fake: tuple[DecodeSide, SharedBlocks],
) -> None:
    side, shared = fake
    shared.tensors[2].handle = b"missing".ljust(64, b"\0")
    with pytest.raises(OSError):
        side.mover.add_peer(0, -1, shared)
    assert opened(side) == 0


@pytest.mark.parametrize("field", [*FIELDS, "dtype", "block_bytes"])
def test_another_layout_is_refused_by_the_names_of_its_fields(
    field: str, fake: tuple[DecodeSide, SharedBlocks]
) -> None:
    side, shared = fake
    if field in FIELDS:
        shared = replace(shared, **{field: FIELDS[field]})
    else:
        setattr(shared.tensors[1], field, "int8" if field == "dtype" else 48)
    with pytest.raises(ConfigError, match=f"prefill engine 3 .*: {field} is .* instead of ") as caught:
        side.mover.add_peer(3, -1, shared)
    others = {*FIELDS, "dtype", "block_bytes"} - {field}
    assert not [name for name in others if f"{name} is" in str(caught.value)] and opened(side) == 0


def test_numbers_of_blocks_may_differ(fake: tuple[DecodeSide, SharedBlocks]) -> None:
    side, shared = fake
    side.mover.add_peer(0, -1, replace(shared, num_blocks=99))
    with pytest.raises(ConfigError, match="transport is none"):
        side.mover.add_peer(1, -1, None)
