"""How many KV blocks fit beside the weights, the slot columns and what a step takes, or what the user asked for.

Pure arithmetic over measured figures, so that `quire doctor` can show the same numbers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from quire.config import EngineConfig
from quire.models.spec import ModelSpec
from quire.sampling.logprobs import scoring_bytes
from quire.types import ConfigError
from quire.worker.host_memory import host_memory
from quire.worker.kv_cache import block_bytes

log = logging.getLogger("quire")

_MIN_AUTO_LEN = 256  # tokens; an automatic context shorter than this is an error, not a fallback


@dataclass(frozen=True, slots=True)
class KVSize:
    """The outcome: `num_blocks` blocks of `block_size` tokens, `block_bytes` each."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device's memory."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else host_memory()


def gpu_memory(device: torch.device) -> int:
    """Total bytes of a GPU; 0 for a CPU."""
    return free_memory(device)[1] if device.type == "cuda" else 0


def check_weights_fit(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of the weights. Raises ConfigError if they exceed the free memory of `device`."""
    needed, (free, total) = spec.num_parameters * dtype.itemsize, free_memory(device)
    if needed > free:
        raise ConfigError(
            f"the weights of {config.model} need {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB are free on {device}; choose a smaller model or dtype, or free memory"
        )
    return needed


def kv_budget(config: EngineConfig, device: torch.device, reserved: int) -> int:
    """Return the bytes for KV blocks and slot columns: what memory_utilization leaves beside `reserved` bytes.

    With kv_cache_memory set it is that number, for the blocks alone. On a CPU the memory belongs to other programs
    too, so half of the available share is taken.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    free, total = free_memory(device)
    if device.type == "cuda":
        budget = int(free - reserved - (1 - config.memory_utilization) * total)
    else:
        budget = int((free - reserved) * config.memory_utilization / 2)
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {free >> 20} of {total >> 20} MiB are free on {device}, "
            f"{reserved >> 20} MiB of which other parts need, and memory_utilization is "
            f"{config.memory_utilization}; free memory, raise memory_utilization or lower max_num_batched_tokens"
        )
    return budget


def column_bytes(config: EngineConfig, max_len: int) -> int:
    """Return the bytes of the slot columns: four for each token, and each block, that a request may have."""
    slots, block = (config.max_num_seqs or 1) + 1, min(config.block_size, max_len)
    return 4 * slots * (max_len + -(-max_len // block))


def sampling_bytes(config: EngineConfig, vocab_size: int, logits: torch.dtype) -> int:
    """Return the most that a step holds at once behind its model: the logits of all rows, a float32 copy that
    penalties and masks change, the rows that want log-probabilities, and what scoring them takes."""
    rows, tokens = config.max_num_seqs or 1, config.max_num_batched_tokens or 1
    return rows * vocab_size * (2 * logits.itemsize + 4) + scoring_bytes(
        max(rows, tokens), vocab_size, logits.itemsize
    )


def cpu_step_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return about what the largest step takes on a CPU, where it cannot be measured without the time it takes."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = 4 * spec.hidden_size + 2 * heads + 3 * spec.intermediate_size
    tokens = config.max_num_batched_tokens or 1
    return tokens * per_token * dtype.itemsize + sampling_bytes(config, spec.vocab_size, dtype)


def fit_context(
    config: EngineConfig, asked_len: int | None, spec: ModelSpec, dtype: torch.dtype, budget: int
) -> int:
    """Return the longest context of which one request fits into `budget` bytes, at most that of `config`.

    An automatic context shrinks to what fits; one that was asked for (`asked_len`) and does not fit raises
    ConfigError. Unless kv_cache_memory is set, the slot columns come out of `budget` too.
    """
    max_len, block = config.max_model_len or 1, config.block_size
    token_bytes = _token_bytes(config, spec, dtype)
    if max_len * token_bytes + _columns_in_budget(config, max_len) <= budget:
        return max_len
    column = _columns_in_budget(config, max_len) / max_len
    room = int(budget / (token_bytes + column))
    if asked_len is not None or room < min(_MIN_AUTO_LEN, max_len):
        raise ConfigError(
            f"max_model_len {max_len} needs {int(max_len * (token_bytes + column)) >> 20} MiB of KV cache, but "
            f"{budget >> 20} MiB are there; lower max_model_len or raise kv_cache_memory"
        )
    return room if config.kv_layout != "paged" else max(room // block * block, 1)


def with_context(config: EngineConfig, max_len: int) -> EngineConfig:
    """Return `config` with that context, and the block size that follows from it unless the layout is paged."""
    block = config.block_size if config.kv_layout == "paged" else max_len
    return replace(config, max_model_len=max_len, block_size=block)


def size_kv(
    config: EngineConfig,
    asked_len: int | None,
    spec: ModelSpec,
    dtype: torch.dtype,
    budget: int,
    device: torch.device,
) -> KVSize:
    """Fit blocks into `budget` bytes. `config` is resolved; `asked_len` is max_model_len as the user gave it.

    Raises ConfigError if not even one request of full length fits.
    """
    max_len = fit_context(config, asked_len, spec, dtype, budget)
    config = with_context(config, max_len)
    block_bytes = _token_bytes(config, spec, dtype) * config.block_size
    per_request = -(-max_len // config.block_size)
    room = max(budget - _columns_in_budget(config, max_len), 0) // block_bytes
    useful = (config.max_num_seqs or 1) * per_request
    if config.kv_layout == "paged" and device.type == "cuda":
        useful *= 2  # for the prefix cache; on a CPU other programs have a use for that memory
    blocks = min(room, useful)
    if blocks < per_request:  # rounding up to whole blocks
        raise ConfigError(
            f"one request of max_model_len {max_len} needs {per_request} blocks of {block_bytes} bytes, but "
            f"kv_cache_memory holds {room}; lower max_model_len or raise kv_cache_memory"
        )
    return KVSize(blocks, config.block_size, block_bytes, max_len)


def check_kv_fits(config: EngineConfig, size: KVSize, device: torch.device, reserved: int) -> None:
    """Raise ConfigError if a kv_cache_memory that was asked for does not fit beside `reserved` bytes.

    On a CPU, where a block takes memory when it is first written, this is a warning.
    """
    if config.kv_cache_memory is None:
        return
    blocks = size.num_blocks * size.block_bytes
    columns, free = column_bytes(config, size.max_model_len), free_memory(device)[0]
    if blocks + columns + reserved <= free:
        return
    message = (
        f"the KV cache needs {blocks >> 20} MiB, slot columns {columns >> 20} MiB and a step {reserved >> 20} MiB, but "
        f"{free >> 20} MiB are free on {device}; lower kv_cache_memory, max_num_seqs or max_num_batched_tokens"
    )
    if device.type == "cuda":
        raise ConfigError(message)
    log.warning("%s", message)


def _token_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    layers = spec.num_layers if config.kv_layout != "none" else 1
    return block_bytes(layers, 1, spec.num_kv_heads, spec.head_dim, dtype)


def _columns_in_budget(config: EngineConfig, max_len: int) -> int:
    return 0 if config.kv_cache_memory is not None else column_bytes(config, max_len)
