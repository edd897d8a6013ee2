"""The worker half of KV transfers, made from settings: host memory and files of one rank."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from quire import __version__
from quire.config import EngineConfig
from quire.models.spec import ModelSpec
from quire.types import ConfigError
from quire.worker.executor import DeviceGuard
from quire.worker.memory.host_memory import host_memory
from quire.worker.memory.kv_groups import LayerGroups
from quire.worker.transfer.block_bytes import BlockBytes
from quire.worker.transfer.files import BlockFiles
from quire.worker.transfer.mover import CpuCopier, GpuCopier, LocalMover

GB = 10**9
_UNLIMITED_ROWS = 1 << 30
_BUFFER_BYTES = (
    128 << 20
)  # on a GPU, in each direction: so much is evicted in a step before it waits for the way out


def host_rows(config: EngineConfig, block_bytes: int) -> int:
    """Return the rows of host memory for this rank's part of evicted blocks; 0 without kv_host_memory.

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
    if not block_bytes:  # a stage without attention does not limit the others
        return _UNLIMITED_ROWS
    rows = wanted // config.num_ranks // block_bytes
    if not rows:
        raise ConfigError(
            f"kv_host_memory {config.kv_host_memory:g} GB is less than a block of {block_bytes} bytes"
        )
    return rows


def open_mover(
    config: EngineConfig, blocks: BlockBytes, rows: int, guard: DeviceGuard, fingerprint: bytes
) -> LocalMover:
    """Return the mover of a rank over `rows` rows of host memory, and the files of kv_disk."""
    files = None
    if config.kv_disk is not None:
        secret = bytes.fromhex(config.cache_secret or "")
        files = BlockFiles(Path(config.kv_disk), fingerprint, secret, blocks.size)
    if blocks.parts and blocks.parts[0].is_cuda:
        return LocalMover(GpuCopier(blocks, rows, max(1, _BUFFER_BYTES // blocks.size)), guard, files)
    return LocalMover(CpuCopier(blocks, rows), guard, files)


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
) -> bytes:
    """Return 16 bytes that differ if anything differs that decides the bytes of a block.

    The weights are identified by the names, sizes and times of the model's files.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, about.st_size, about.st_mtime_ns) for file in files for about in [file.stat()]]
    about = (
        __version__, stats, spec, groups, backend, dtype, rank, config.tensor_parallel_size, config.block_size,
        config.quantization, config.load_format, config.seed, config.spec_model, config.cpu_kernels,
    )  # fmt: skip
    return blake2b(repr(about).encode(), digest_size=16).digest()
