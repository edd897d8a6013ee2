"""A process that exports blocks and then does nothing: `python ipc_peer.py DEVICE FOLDER`.

It prints the description of its blocks in one line, as msgpack in hexadecimal digits, and ends when its input does. On
the device `fake` the blocks are in files, whose names are the handles.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from quire.types import SharedBlocks
from quire.worker.transfer.block_bytes import BlockBytes
from quire.worker.transfer.cuda_ipc import CudaHandles, IpcExports, MemoryHandles
from quire.worker.transfer.peers import describe_blocks

BLOCKS, SHAPES = 12, ((4, 6), (4, 6), (1001,))  # of which the first two share an allocation
DTYPES = (torch.float32, torch.float32, torch.uint8)


class FileHandles:
    """Handles of memory that is in files: what a driver does, without a GPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._allocated: list[tuple[int, int, bytes]] = []  # address, bytes, handle
        self.opened: dict[int, np.ndarray] = {}
        self.opens = 0

    def allocate(self, size: int) -> torch.Tensor:
        path = self._folder / f"{os.getpid()}-{len(list(self._folder.iterdir()))}"
        path.write_bytes(bytes(size))
        memory = self._map(path)
        self._allocated.append((memory.ctypes.data, size, path.name.encode().ljust(64, b"\0")))
        return torch.from_numpy(memory)

    @staticmethod
    def _map(path: Path) -> np.ndarray:
        with path.open("r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)

    def export(self, address: int) -> tuple[bytes, int]:
        for begin, size, handle in self._allocated:
            if begin <= address < begin + size:
                return handle, address - begin
        raise AssertionError("this memory was not allocated here")

    def open(self, handle: bytes) -> int:
        memory = self._map(self._folder / handle.rstrip(b"\0").decode())
        self.opens += 1
        self.opened[memory.ctypes.data] = memory
        return memory.ctypes.data

    def close(self, address: int) -> None:
        del self.opened[address]


def make_layers(device: str, handles: MemoryHandles | None) -> list[tuple[torch.Tensor, ...]]:
    """Return zero blocks. The first two tensors share an allocation, as small ones do in PyTorch's allocator."""
    sizes = [BLOCKS * torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(SHAPES, DTYPES)]
    if isinstance(handles, FileHandles):
        both, last = handles.allocate(sizes[0] + sizes[1]), handles.allocate(sizes[2])
    else:
        both, last = (
            torch.zeros(size, dtype=torch.uint8, device=device) for size in (sizes[0] + sizes[1], sizes[2])
        )
    flat = (both[: sizes[0]], both[sizes[0] :], last)
    parts = [x.view(dtype).view(BLOCKS, *shape) for x, shape, dtype in zip(flat, SHAPES, DTYPES)]
    return [(parts[0], parts[1]), (parts[2],)]


def expected(tensor: int, block: int) -> int:
    """Return the value of every byte of a block of the peer."""
    return 1 + (37 * tensor + 11 * block) % 250


def description(layers: list[tuple[torch.Tensor, ...]], handles: MemoryHandles | None) -> SharedBlocks:
    exports = None if handles is None else IpcExports(handles)
    return describe_blocks("cuda-ipc", BlockBytes(layers), 16, [(2, None)], exports)


def main(device: str, folder: str) -> None:
    """Export the blocks and wait."""
    handles = FileHandles(Path(folder)) if device == "fake" else CudaHandles(torch.device(device))
    layers = make_layers(device, handles)
    for number, part in enumerate(BlockBytes(layers).parts):
        for block in range(BLOCKS):
            part[block] = expected(number, block)
    if device == "cuda":
        torch.cuda.synchronize()
    print(msgspec.msgpack.encode(description(layers, handles)).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
