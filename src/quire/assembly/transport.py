"""The transport between prefill and decode engines, picked from settings: both of its sides, for one rank."""

from __future__ import annotations

from functools import partial

import torch

from quire.config import EngineConfig
from quire.types import ConfigError
from quire.worker.transfer.block_bytes import BlockBytes
from quire.worker.transfer.peers import BlockExports, PeerReader
from quire.worker.transfer.shared_memory import MemoryExports, MemoryReader


def pick_transport(config: EngineConfig, device: torch.device) -> str:
    """Return the name of the transport.

    Raises:
        ConfigError: if the device lacks it.
    """
    fitting = "cuda-ipc" if device.type == "cuda" else "shared-memory"
    if config.kv_transport not in ("auto", fitting):
        raise ConfigError(
            f"kv_transport {config.kv_transport} does not suit device {device}; use {fitting} or auto"
        )
    return fitting


def open_exports(transport: str, descriptor: int, device: torch.device) -> BlockExports:
    """Return the side of a prefill engine, whose decode engine has opened the file `descriptor`."""
    if transport == "shared-memory":
        return MemoryExports(descriptor)
    from quire.worker.transfer.cuda_ipc import CudaHandles, IpcExports

    return IpcExports(CudaHandles(device))


def open_reader(transport: str, blocks: BlockBytes, device: torch.device) -> PeerReader:
    """Return the side of a decode engine with these blocks."""
    if transport == "shared-memory":
        return MemoryReader(blocks)
    # Imported here: an installation for CPUs has no Triton.
    from quire.kernels.block_copy import BlockCopy
    from quire.worker.transfer.cuda_ipc import CudaHandles, IpcReader, SideStream

    return IpcReader(blocks, CudaHandles(device), partial(BlockCopy, device), SideStream(device))
