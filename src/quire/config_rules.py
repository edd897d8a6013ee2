"""The values that settings may have, and the table of combinations that cannot work."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from quire.types import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineConfig

Batching = Literal["continuous", "static"]
KVLayoutName = Literal["paged", "contiguous", "none"]
Eviction = Literal["lru", "fifo"]
SpecMethod = Literal["off", "ngram", "suffix", "draft", "eagle", "eagle3", "mtp"]
SchedulingPolicy = Literal["fcfs", "priority"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
KVTransport = Literal["auto", "shared-memory", "cuda-ipc"]
ExpertExchangeName = Literal["auto", "all-reduce", "all-to-all"]
Quantization = Literal["auto", "fp8", "fp8-block", "int8", "int4"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"]
LatentPrefill = Literal["absorbed", "expanded"]
PrefillAttention = Literal["auto", "reference", "library", "triton", LatentPrefill]
DecodeAttention = Literal["auto", "reference", "library", "triton", "cpu"]
LayerBackend = Literal["auto", "reference", "library"]

_COUNTS = (
    "block_size",
    "max_num_batched_tokens",
    "mixed_prefill_tokens",
    "max_num_seqs",
    "max_model_len",
    "kv_cache_memory",
    "cpu_threads",
    "decode_splits",
    "spec_tokens",
    "state_snapshots",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)
# A mistyped zero more would start so many threads or processes that the machine fails rather than the command.
_AT_MOST = {
    "cpu_threads": 1024,
    "tensor_parallel_size": 64,
    "pipeline_parallel_size": 64,
    "data_parallel_size": 1024,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "batching": get_args(Batching),
    "kv_layout": get_args(KVLayoutName),
    "eviction": get_args(Eviction),
    "scheduling_policy": get_args(SchedulingPolicy),
    "spec_method": get_args(SpecMethod),
    "dtype": get_args(Dtype),
    "load_format": get_args(LoadFormat),
    "quantization": get_args(Quantization),
    "spec_quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVCacheDtype),
    "kv_transport": get_args(KVTransport),
    "expert_exchange": get_args(ExpertExchangeName),
    "attention": ("auto", "reference", "triton", "cpu"),
    "prefill_attention": get_args(PrefillAttention),
    "decode_attention": get_args(DecodeAttention),
    "norm_backend": get_args(LayerBackend),
    "mlp_backend": get_args(LayerBackend),
}

# Combinations that cannot work, each with its error message. rank.py checks those that depend on the model.
ILLEGAL: tuple[tuple[Callable[[EngineConfig], bool], str], ...] = (
    (
        lambda c: (
            c.rank_address is not None and not re.fullmatch(r"[^:]+:\d{1,5}|\[.+\]:\d{1,5}", c.rank_address)
        ),
        "rank_address must be HOST:PORT, got {c.rank_address}",
    ),
    (
        lambda c: c.rank_address is not None and c.tensor_parallel_size == 1,
        "rank_address needs tensor_parallel_size above 1: there are no other ranks",
    ),
    (
        lambda c: c.rank_address is not None and not c.rank_token,
        "rank_address needs a rank_token (or QUIRE_RANK_TOKEN), which the other ranks present",
    ),
    (
        lambda c: c.max_model_len == 1,
        "max_model_len must be at least 2, one token of prompt and one of output, got 1",
    ),
    (
        lambda c: c.chunked_prefill is False and bool(c.mixed_prefill_tokens),
        "mixed_prefill_tokens splits prompts over steps, so it needs chunked_prefill on",
    ),
    (
        lambda c: c.target_itl is not None and not c.target_itl > 0,
        "target_itl must be above 0 ms, got {c.target_itl:g}",
    ),
    (
        lambda c: c.target_itl is not None and (c.chunked_prefill is False or c.kv_layout == "none"),
        "target_itl chooses the size of chunks, so it needs chunked_prefill on",
    ),
    (
        lambda c: c.target_ttft is not None and not c.target_ttft > 0,
        "target_ttft must be above 0 ms, got {c.target_ttft:g}",
    ),
    (
        lambda c: c.prefill_slowdown is not None and not c.prefill_slowdown > 1,
        "prefill_slowdown must be above 1, got {c.prefill_slowdown:g}",
    ),
    (
        lambda c: c.prefill_slowdown is not None and (c.chunked_prefill is False or c.kv_layout == "none"),
        "prefill_slowdown chooses the size of chunks, so it needs chunked_prefill on",
    ),
    (
        lambda c: c.target_itl is not None and c.mixed_prefill_tokens is not None,
        "target_itl replaces mixed_prefill_tokens: give one of them",
    ),
    (
        lambda c: c.kv_layout == "none" and bool(c.chunked_prefill),
        "chunked_prefill needs a KV cache, but with kv_layout none every step recomputes the whole sequence",
    ),
    (
        lambda c: c.kv_layout == "none" and bool(c.prefix_caching),
        "prefix_caching needs a KV cache, but with kv_layout none nothing is kept between steps",
    ),
    (
        lambda c: c.kv_host_memory is not None and (c.prefix_caching is False or c.kv_layout == "none"),
        "kv_host_memory keeps blocks for the prefix cache, so it needs prefix_caching on and another kv_layout than none",
    ),
    (
        lambda c: c.disaggregate is not None and (c.prefix_caching is False or c.kv_layout != "paged"),
        "disaggregate moves blocks by their names, so it needs prefix_caching on and kv_layout paged",
    ),
    (
        lambda c: c.disaggregate is not None and (c.tensor_parallel_size > 1 or c.spec_method == "draft"),
        "disaggregate serves engines of one rank without a draft model so far; "
        "leave out tensor_parallel_size and spec_method draft",
    ),
    (
        lambda c: c.disaggregate is not None and c.kv_host_memory is not None,
        "disaggregate and kv_host_memory exclude each other so far; leave one out",
    ),
    (
        lambda c: c.kv_disk is not None and c.kv_host_memory is None,
        "kv_disk is reached through host memory; set kv_host_memory too",
    ),
    (
        lambda c: c.kv_layout == "none" and c.spec_method != "off",
        "spec_method {c.spec_method} needs a KV cache, but with kv_layout none every step recomputes the whole sequence; "
        "use kv_layout paged",
    ),
    (
        lambda c: c.spec_method == "off" and bool(c.spec_tokens),
        "spec_tokens needs a spec_method, which is off; use spec_method ngram",
    ),
    (
        lambda c: c.spec_method in ("draft", "eagle", "eagle3") and c.spec_model is None,
        "spec_method {c.spec_method} needs a spec_model; add --spec-model with a draft model that has the tokenizer of the "
        "model, or for eagle and eagle3 with such a head",
    ),
    (
        lambda c: c.spec_quantization != "auto" and c.spec_model is None,
        "spec_quantization {c.spec_quantization} converts a spec_model, but there is none; use quantization for the model",
    ),
    (
        lambda c: c.spec_method == "mtp" and c.spec_model is not None,
        "spec_model {c.spec_model} needs a spec_method that uses it, got mtp, which reads the layer in the model's own "
        "checkpoint; leave out spec_model, or add --spec-method draft, eagle or eagle3",
    ),
    (
        lambda c: c.spec_method in ("off", "ngram", "suffix") and c.spec_model is not None,
        "spec_model {c.spec_model} needs a spec_method that uses it, got {c.spec_method}; add --spec-method draft, or "
        "eagle or eagle3 for such a head",
    ),
    (
        lambda c: c.pipeline_parallel_size > 1 and c.spec_method == "suffix",
        "spec_method suffix does not run with stages yet, but pipeline_parallel_size is {c.pipeline_parallel_size}; use "
        "spec_method ngram or draft",
    ),
    (
        lambda c: c.pipeline_parallel_size > 1 and c.spec_method in ("eagle", "eagle3", "mtp"),
        "spec_method {c.spec_method} needs the hidden states of all layers in one rank, but pipeline_parallel_size is "
        "{c.pipeline_parallel_size}; use spec_method ngram or draft",
    ),
    (
        lambda c: c.expert_exchange != "auto" and not c.enable_expert_parallel,
        "expert_exchange {c.expert_exchange} needs enable_expert_parallel",
    ),
    (
        lambda c: (c.spec_tokens or 0) > 16,
        "spec_tokens must be at most 16, got {c.spec_tokens}",
    ),
)


def check_values(config: EngineConfig) -> None:
    """Raise ConfigError, which names the setting and what it may be, for values outside their limits."""
    _check_numbers(config)
    if config.cache_secret is not None and not _is_secret(config.cache_secret):
        raise ConfigError("cache_secret must be 32 to 128 hexadecimal digits, two for each byte")
    if not config.rank_timeout > 0:
        raise ConfigError(f"rank_timeout must be above 0 seconds, got {config.rank_timeout}")
    if config.disaggregate is not None:
        _, decodes = parse_disaggregation(config.disaggregate)
        if config.data_parallel_size not in (1, decodes):
            raise ConfigError(
                f"disaggregate {config.disaggregate} has {decodes} decode engines, but data_parallel_size is "
                f"{config.data_parallel_size}; leave one out"
            )
    if config.pipeline_layer_split is not None:
        parse_layer_split(config.pipeline_layer_split, config.pipeline_parallel_size)


def check_combinations(config: EngineConfig) -> None:
    """Raise ConfigError for settings that cannot work together. Those that depend on the model are checked by rank.py."""
    for illegal, message in ILLEGAL:
        if illegal(config):
            raise ConfigError(message.format(c=config))


def _check_numbers(config: EngineConfig) -> None:
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(config, name)!r}")
    for name in _COUNTS:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if value is not None and value > _AT_MOST.get(name, value):
            raise ConfigError(f"{name} must be at most {_AT_MOST[name]}, got {value}")
    optional = () if config.compile_processes is None else ("compile_processes",)
    for name in ("state_snapshot_interval", "state_snapshot_answers", *optional):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{name} must be an integer of at least 0, got {value!r}")
    if not 0 < config.memory_utilization <= 1:
        raise ConfigError(f"memory_utilization must be in (0, 1], got {config.memory_utilization}")
    for name in ("kv_host_memory", "kv_disk_size"):
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be above 0 GB, got {value}")


def _is_secret(text: str) -> bool:
    return 32 <= len(text) <= 128 and len(text) % 2 == 0 and not set(text) - set("0123456789abcdefABCDEF")


def parse_layer_split(text: str, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Raises:
        ConfigError: if `text` does not hold a positive number for each of `stages` stages.
    """
    if stages == 1:
        raise ConfigError(f"pipeline_layer_split {text} needs a pipeline_parallel_size above 1")
    numbers = text.split(",")
    if len(numbers) != stages or not all(
        n.strip().isascii() and n.strip().isdigit() and int(n) for n in numbers
    ):
        raise ConfigError(
            f"pipeline_layer_split must be {stages} numbers above 0, one for each stage of pipeline_parallel_size, such "
            f"as {','.join(['16'] * stages)}, got {text!r}"
        )
    return tuple(map(int, numbers))


def parse_disaggregation(text: str) -> tuple[int, int]:
    """Return the numbers of prefill and decode engines of a text such as `prefill:1,decode:1`.

    Raises:
        ConfigError: if it is something else, or decode engines cannot have equally many prefill engines.
    """
    parts = dict(part.partition(":")[::2] for part in text.replace(",", " ").split())
    if parts.keys() != {"prefill", "decode"} or not all(
        n.isdecimal() and 0 < int(n) < 100 for n in parts.values()
    ):
        raise ConfigError(f"disaggregate must look like prefill:1,decode:1, got {text!r}")
    prefills, decodes = int(parts["prefill"]), int(parts["decode"])
    if prefills % decodes:
        raise ConfigError(
            f"disaggregate needs a multiple of {decodes} prefill engines, because each decode engine owns equally many; "
            f"got {prefills}"
        )
    return prefills, decodes
