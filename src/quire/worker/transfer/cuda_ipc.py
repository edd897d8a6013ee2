"""The transport between engines on GPUs of one host: handles of GPU memory, opened by another process.

The prefill engine sends a handle of each allocation that holds blocks (64 bytes, `cuIpcGetMemHandle`). The decode engine
maps these allocations (`cuIpcOpenMemHandle`), and a kernel copies blocks from there into its own KV cache, beside the
steps. Two engines may share a GPU. Nothing else crosses: a block is announced when the step that wrote it has ended, so
no event has to be shared.

Copies from a process that has just died rely on the driver to keep memory until the last process has closed it. CUDA's
documentation does not promise that; tests/unit/test_peers.py checks it on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from quire.types import ConfigError, SharedBlocks
from quire.worker.transfer.block_bytes import BlockBytes

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class MemoryHandles(Protocol):
    """The functions of a driver that name memory across processes."""

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation that holds an address, and the offset of the address in it."""
        ...

    def open(self, handle: bytes) -> int:
        """Map the allocation of another process. Return its address here."""
        ...

    def close(self, address: int) -> None:
        """Unmap what `open` has returned."""
        ...


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)


class CudaHandles:
    """The handles of CUDA's driver, in the context that torch uses on a device.

    Raises:
        ConfigError: by all methods, with the error of the driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuInit", 0)
        self._check("cuDeviceGet", ctypes.byref(number), device.index or 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def export(self, address: int) -> tuple[bytes, int]:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        where = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), where)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), where)
        return bytes(handle), address - base.value

    def open(self, handle: bytes) -> int:
        address, flags = ctypes.c_uint64(), ctypes.c_uint(_LAZY_PEER_ACCESS)
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, flags)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *args: object) -> None:
        """Call a function of the driver in the context, whatever the thread's current one is."""
        self._check("cuCtxPushCurrent_v2", self._context)
        try:
            self._check(name, *args)
        finally:
            self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _check(self, name: str, *args: object) -> None:
        if code := getattr(self._driver, name)(*args):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise ConfigError(
                f"kv_transport cuda-ipc: {name} failed with {(text.value or b'unknown').decode()} ({code}); it needs "
                "Linux, processes of one container or host, and PyTorch's default allocator of GPU memory"
            )


class IpcExports:
    """The blocks of a prefill engine, exported as handles. They may be anywhere in the memory of the GPU."""

    memory = None

    def __init__(self, handles: MemoryHandles) -> None:
        self.place = handles.export


class IpcReader:
    """The blocks of a decode engine, into which blocks of prefill engines are copied.

    Args:
        blocks: the KV cache of this engine.
        handles: the driver.
        copier: makes a function that copies pairs of blocks, from addresses of the source, addresses of the target
            and the bytes of a block in each tensor.
        begin: runs such a function for pairs of blocks, and returns what awaits its end.
    """

    def __init__(
        self,
        blocks: BlockBytes,
        handles: MemoryHandles,
        copier: Callable[[list[int], list[int], list[int]], Callable[[torch.Tensor], None]],
        begin: BeginCopy,
    ) -> None:
        self._handles, self._copier, self._begin = handles, copier, begin
        self._targets = [part.data_ptr() for part in blocks.parts]
        self._sizes = [part.shape[1] for part in blocks.parts]

    def open(self, memory: int, shared: SharedBlocks) -> IpcPeer:
        addresses: dict[bytes, int] = {}  # a handle is opened once: tensors share allocations
        try:
            for tensor in shared.tensors:
                if tensor.handle not in addresses:
                    addresses[tensor.handle] = self._handles.open(tensor.handle)
        except BaseException:
            for address in addresses.values():
                self._handles.close(address)
            raise
        sources = [addresses[tensor.handle] + tensor.offset for tensor in shared.tensors]
        copy = self._copier(sources, self._targets, self._sizes)
        return IpcPeer([*addresses.values()], self._handles, copy, self._begin)


class IpcPeer:
    """The mapped blocks of one prefill engine."""

    def __init__(
        self,
        addresses: list[int],
        handles: MemoryHandles,
        copy: Callable[[torch.Tensor], None],
        begin: BeginCopy,
    ) -> None:
        self._addresses, self._handles, self._copy, self._begin = addresses, handles, copy, begin

    def begin_pull(self, sources: list[int], blocks: list[int]) -> Callable[[], None]:
        return self._begin(self._copy, sources, blocks)

    def close(self) -> None:
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            self._handles.close(address)


class BeginCopy(Protocol):
    """Starts a copy of blocks."""

    def __call__(
        self, copy: Callable[[torch.Tensor], None], sources: list[int], blocks: list[int]
    ) -> Callable[[], None]:
        """Run `copy` with int64 [2, pairs] of `sources` and `blocks`. Return what awaits its end."""
        ...


class SideStream:
    """A stream of a GPU beside that of the steps, on which copies run.

    A copy waits for the steps launched before it, which may still write to its targets, and no step waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def __call__(
        self, copy: Callable[[torch.Tensor], None], sources: list[int], blocks: list[int]
    ) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            pairs = torch.tensor([sources, blocks], dtype=torch.int64, pin_memory=True)
            copy(pairs.to(self._device, non_blocking=True))
            event.record(self._stream)
        return event.synchronize
