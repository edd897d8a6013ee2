"""The worker half of KV transfers, made from settings: host memory and files of one rank."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from quire import __version__
from quire.config import EngineConfig
from quire.models.spec import ModelSpec
from quire.types import ConfigError
from quire.worker.executor import device_guard
from quire.worker.memory.host_memory import host_memory
from quire.worker.memory.kv_groups import LayerGroups
from quire.worker.transfer.block_bytes import BlockBytes, SnapshotBytes
from quire.worker.transfer.files import BlockFiles
from quire.worker.transfer.mover import CpuCopier, GpuCopier, LocalMover

GB = 10**9
_UNLIMITED_ROWS = 1 << 30
_BUFFER_BYTES = (
    128 << 20
)  # on a GPU, in each direction: so much is evicted in a step before it waits for the way out


def snapshot_pages(config: EngineConfig, state_bytes: int, block_bytes: int) -> int:
    """Return the pages into which a rank cuts a snapshot so that none is larger than a block.

    Args:
        config: settings.
        state_bytes: bytes of a snapshot on this rank.
        block_bytes: bytes of a block on this rank; 0 for a stage without attention, which has no preference.
    """
    if config.kv_host_memory is None or not state_bytes:
        return 0
    return -(-state_bytes // block_bytes) if block_bytes else 1


def host_rows(config: EngineConfig, block_bytes: int) -> int:
    """Return the rows of host memory for this rank's part of evicted blocks; 0 without kv_host_memory.

    Args:
        config: settings.
        block_bytes: bytes of a row: of a block, or of a page of a snapshot.

    Raises:
        ConfigError: if the memory is too small for a block, or larger than what is free.
    """
    if config.kv_host_memory is None:
        return 0
    wanted = int(config.kv_host_memory * GB)
    free, _ = host_memory()
    if wanted > free:
        raise ConfigError(
            f"kv_host_memory {config.kv_host_memory:g} GB exceeds the {free / GB:.1f} GB of host memory that are free"
        )
    if not block_bytes:  # a stage without attention and states does not limit the others
        return _UNLIMITED_ROWS
    rows = wanted // config.num_ranks // block_bytes
    if not rows:
        raise ConfigError(
            f"kv_host_memory {config.kv_host_memory:g} GB is less than a block of {block_bytes} bytes"
        )
    return rows


def open_mover(
    config: EngineConfig,
    blocks: BlockBytes,
    snapshots: SnapshotBytes,
    rows: int,
    row_bytes: int,
    device: torch.device,
    fingerprint: bytes,
) -> LocalMover:
    """Return the mover of a rank over `rows` rows of host memory, and the files of kv_disk."""
    files, guard = None, device_guard(device)
    if config.kv_disk is not None:
        secret = bytes.fromhex(config.cache_secret or "")
        files = BlockFiles(Path(config.kv_disk), fingerprint, secret, row_bytes)
    if device.type == "cuda" and row_bytes:
        buffer_rows = max(1, _BUFFER_BYTES // row_bytes)
        return LocalMover(GpuCopier(blocks, rows, row_bytes, buffer_rows, device, snapshots), guard, files)
    return LocalMover(CpuCopier(blocks, rows, row_bytes, snapshots), guard, files)


def disk_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Return the number of blocks that the disk may keep; 0 without kv_disk."""
    if config.kv_disk is None:
        return 0
    return max(1, int(config.kv_disk_size * GB) // config.num_ranks // max(1, block_bytes))


def block_fingerprint(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    *,
    groups: LayerGroups,
    backend: str,
    dtype: torch.dtype,
    rank: int,
    pages: int,
) -> bytes:
    """Return 16 bytes that differ if anything differs that decides the bytes of a block or a page of a snapshot.

    The weights are identified by the names, sizes and times of the model's files.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, about.st_size, about.st_mtime_ns) for file in files for about in [file.stat()]]
    about = (
        __version__, stats, spec, groups, backend, dtype, rank, config.tensor_parallel_size, config.block_size,
        config.quantization, config.load_format, config.seed, config.spec_model, config.cpu_kernels,
        config.pipeline_parallel_size, config.pipeline_layer_split, pages,
    )  # fmt: skip
    return blake2b(repr(about).encode(), digest_size=16).digest()
