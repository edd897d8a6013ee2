"""Settings: frozen dataclasses, defaults resolved in one place, illegal combinations in one table.

A field that is None means "auto"; `EngineConfig.resolved` replaces what depends on other fields, and
`build.py` what depends on the model and the machine. Only this file and `cli/` read the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from quire.types import ConfigError

# Threads that wait for each other spin by default. When another process has one of the cores, that costs a
# scheduler's time slice (milliseconds) at each of the hundreds of barriers in a step. Spinning for some 0.2 to 0.5 ms
# and then sleeping is as fast alone, and beside a busy process too; ten times less puts threads to sleep between
# the layers of a step, which doubles its time. Must be set before torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

Batching = Literal["continuous", "static"]
KVLayout = Literal["paged", "contiguous", "none"]
Eviction = Literal["lru", "fifo"]
SchedulingPolicy = Literal["fcfs", "priority"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides how an engine runs. Each field is also a command-line flag."""

    model: str = _setting("demo", "a folder, a .gguf file, a Hugging Face id, or demo / demo-draft")
    revision: str | None = _setting(None, "branch, tag or commit of a Hugging Face id")
    tokenizer: str | None = _setting(None, "tokenizer folder or file, when it is not the model's own")
    skip_tokenizer_init: bool = _setting(False, "work with token ids alone")
    load_format: LoadFormat = _setting(
        "auto", "auto reads the checkpoint; dummy makes random weights in the true shapes"
    )
    dtype: Dtype = _setting("auto", "number format of weights and activations; auto follows the checkpoint")
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N")
    seed: int = _setting(0, "seed of dummy weights and of requests that bring none")

    batching: Batching = _setting(
        "continuous", "continuous admits at every step; static only into an empty batch"
    )
    kv_layout: KVLayout = _setting(
        "paged", "paged; contiguous (one page as long as the context); none (recompute everything)"
    )
    block_size: int = _setting(16, "tokens per block")
    chunked_prefill: bool | None = _setting(
        None, "split long prompts over steps (default: on, off with kv_layout none)"
    )
    max_num_batched_tokens: int | None = _setting(
        None, "tokens per step (default: 8192 on a GPU, 2048 on a CPU)"
    )
    mixed_prefill_tokens: int | None = _setting(
        None,
        "tokens for prompts in a step in which other requests decode: fewer keep answers fluent, more start "
        "them sooner (default: 512 on a CPU; all on a GPU, and when chunked_prefill is off)",
    )
    prefix_caching: bool | None = _setting(
        None, "reuse the KV of equal prompt beginnings (default: on, off with kv_layout none)"
    )
    eviction: Eviction = _setting("lru", "which cached block goes first: lru or fifo")
    scheduling_policy: SchedulingPolicy = _setting("fcfs", "fcfs, or priority (lower number first)")
    overlap: bool = _setting(True, "schedule the next step while the device runs this one")

    max_num_seqs: int | None = _setting(
        None, "requests in a batch (default: 1024 on a GPU of 64 GB or more, 256 on others, 32 on a CPU)"
    )
    max_model_len: int | None = _setting(
        None, "longest prompt + output in tokens (default: what the model and the memory allow)"
    )
    kv_cache_memory: int | None = _setting(None, "bytes for the KV cache (default: measured, what is left)")
    memory_utilization: float = _setting(
        0.9, "share of the device's memory that Quire may use when kv_cache_memory is not given"
    )
    attention: str = _setting(
        "auto",
        "attention back end: auto, reference, triton or cpu (auto: triton on a GPU, cpu with cpu_kernels)",
    )
    cuda_graphs: bool = _setting(True, "replay captured CUDA graphs where the attention back end allows it")
    shared_prefix: bool = _setting(
        True, "read blocks that many decoding requests begin with once for all of them (triton attention)"
    )
    cpu_kernels: bool = _setting(
        True, "on a CPU run small steps by kernels that the C compiler builds at the first start"
    )
    cpu_replay: bool = _setting(
        True, "with cpu_kernels, make a step of up to 8 rows one call, recorded when it first occurs"
    )
    cpu_threads: int | None = _setting(
        None, "threads of a step on a CPU (default: all cores, or one when the step is small)"
    )
    check_invariants: bool = _setting(False, "check the scheduler's books after every step (slow; for tests)")

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"memory_utilization must be in (0, 1], got {self.memory_utilization}")
        for illegal, message in ILLEGAL:
            if illegal(self):
                raise ConfigError(message.format(c=self))

    def resolved(self, gpu_bytes: int, model_max_len: int) -> EngineConfig:
        """The same settings with every None filled in that depends only on other settings, on the memory of
        the GPU (0: it is a CPU) and on the longest context of the model."""
        recompute = self.kv_layout == "none"
        chunked = not recompute if self.chunked_prefill is None else self.chunked_prefill
        max_len = min(self.max_model_len or model_max_len, model_max_len)
        budget = self.max_num_batched_tokens or (8192 if gpu_bytes else 2048)
        if not chunked and budget < max_len:
            if self.max_num_batched_tokens:
                raise ConfigError(
                    f"max_num_batched_tokens ({budget}) must be at least max_model_len ({max_len}) when "
                    "chunked_prefill is off, because a prompt then runs in one step"
                )
            budget = max_len
        return replace(
            self,
            chunked_prefill=chunked,
            prefix_caching=not recompute if self.prefix_caching is None else self.prefix_caching,
            max_num_seqs=self.max_num_seqs or _most_seqs(gpu_bytes),
            max_num_batched_tokens=budget,
            mixed_prefill_tokens=min(self.mixed_prefill_tokens or (budget if gpu_bytes else 512), budget)
            if chunked
            else None,
            max_model_len=max_len,
            block_size=self.block_size if self.kv_layout == "paged" else max_len,
        )


def _most_seqs(gpu_bytes: int) -> int:
    if not gpu_bytes:
        return 32
    return 1024 if gpu_bytes >= 64_000_000_000 else 256


_COUNTS = (
    "block_size",
    "max_num_batched_tokens",
    "mixed_prefill_tokens",
    "max_num_seqs",
    "max_model_len",
    "kv_cache_memory",
    "cpu_threads",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "batching": get_args(Batching),
    "kv_layout": get_args(KVLayout),
    "eviction": get_args(Eviction),
    "scheduling_policy": get_args(SchedulingPolicy),
    "dtype": get_args(Dtype),
    "load_format": get_args(LoadFormat),
    "attention": ("auto", "reference", "triton", "cpu"),
}

# Combinations that cannot work, each with the reason. What depends on the model is checked in build.py.
ILLEGAL: tuple[tuple[Callable[[EngineConfig], bool], str], ...] = (
    (
        lambda c: c.max_model_len == 1,
        "max_model_len must be at least 2, a token in and a token out, got 1",
    ),
    (
        lambda c: c.chunked_prefill is False and bool(c.mixed_prefill_tokens),
        "mixed_prefill_tokens splits prompts over steps, which chunked_prefill off forbids",
    ),
    (
        lambda c: c.kv_layout == "none" and bool(c.chunked_prefill),
        "chunked_prefill needs a KV cache: with kv_layout none every step computes the whole sequence at once",
    ),
    (
        lambda c: c.kv_layout == "none" and bool(c.prefix_caching),
        "prefix_caching needs a KV cache: with kv_layout none nothing is kept from one step to the next",
    ),
)


def env_flag(name: str) -> bool:
    """Whether the environment variable `name` is set to a true value."""
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


def triton_interpreted() -> bool:
    """Whether Triton kernels are interpreted, so that they run (slowly) without a GPU."""
    return env_flag("TRITON_INTERPRET")
