"""How many pages fit: memory left after the weights and the largest step, or what the user asked for.

Pure arithmetic over measured figures, so that `quire doctor` can show the same numbers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.types import ConfigError
from quire.worker.kv_cache import page_bytes

log = logging.getLogger("quire")

_MIN_AUTO_LEN = 256  # tokens; an automatic context shorter than this is an error, not a fallback


@dataclass(frozen=True, slots=True)
class KVSize:
    """The outcome: `num_blocks` pages of `block_size` tokens, `block_bytes` each."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    import psutil  # here: a run on a GPU needs none

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def gpu_memory(device: torch.device) -> int:
    """Total bytes of a GPU; 0 for a CPU."""
    return free_memory(device)[1] if device.type == "cuda" else 0


def kv_budget(config: EngineConfig, device: torch.device, activations: int) -> int:
    """Bytes for KV pages: kv_cache_memory, or what memory_utilization leaves beside all else.

    On a CPU the memory belongs to other programs too, so half of the available share is taken.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    free, total = free_memory(device)
    if device.type == "cuda":
        budget = int(free - activations - (1 - config.memory_utilization) * total)
    else:
        budget = int((free - activations) * config.memory_utilization / 2)
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {free >> 20} of {total >> 20} MiB are free on {device} after "
            f"loading, a step needs {activations >> 20} MiB and memory_utilization is "
            f"{config.memory_utilization}; free memory, raise memory_utilization or lower max_num_batched_tokens"
        )
    return budget


def size_kv(
    config: EngineConfig,
    asked_len: int | None,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    budget: int,
) -> KVSize:
    """Fit pages into `budget` bytes. `config` is resolved; `asked_len` is max_model_len as the user gave it.

    An automatic context shrinks to what fits; an explicit one that does not fit raises ConfigError.
    """
    assert config.max_model_len and config.max_num_seqs
    layers = num_layers if config.kv_layout != "none" else 1
    max_len, block = config.max_model_len, config.block_size
    token_bytes = page_bytes(layers, 1, num_kv_heads, head_dim, dtype)
    if (room := budget // token_bytes) < max_len:
        if asked_len is not None or room < min(_MIN_AUTO_LEN, max_len):
            raise ConfigError(
                f"max_model_len {max_len} needs {max_len * token_bytes >> 20} MiB of KV cache, but "
                f"{budget >> 20} MiB are there; lower max_model_len or raise kv_cache_memory"
            )
        max_len = room if config.kv_layout != "paged" else max(room // block * block, 1)
        log.warning("max_model_len lowered to %d: the KV cache has %d MiB", max_len, budget >> 20)
    if config.kv_layout != "paged":
        block = max_len
    block_bytes = token_bytes * block
    per_request = -(-max_len // block)
    useful = config.max_num_seqs * per_request * (2 if config.kv_layout == "paged" else 1)
    blocks = min(budget // block_bytes, useful)
    if blocks < per_request:  # rounding up to whole pages
        raise ConfigError(
            f"one request of max_model_len {max_len} needs {per_request} pages of {block_bytes} bytes, but "
            f"kv_cache_memory holds {budget // block_bytes}; lower max_model_len or raise kv_cache_memory"
        )
    return KVSize(blocks, block, block_bytes, max_len)
