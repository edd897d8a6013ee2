"""Settings of an engine: one frozen dataclass, one place for defaults, one table of illegal combinations.

A field that is None means "automatic". `EngineConfig.resolved` fills in the values that depend on other fields;
`rank.py` and `assembly/` fill in those that depend on the model and the machine. Only this file and `cli/` read the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from quire.types import ConfigError
from quire.types.speculative import settings_of

# OpenMP threads that wait for each other spin by default. If another process uses one of the cores, that costs a time
# slice of the operating system (milliseconds) at each of the hundreds of barriers in a step. Spinning for 0.2 to 0.5 ms
# and then sleeping is as fast alone, and fast beside a busy process too. A tenth of it puts threads to sleep between the
# layers of a step, which doubles its time. The variable must be set before torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

Batching = Literal["continuous", "static"]
KVLayoutName = Literal["paged", "contiguous", "none"]
Eviction = Literal["lru", "fifo"]
SpecMethod = Literal["off", "ngram", "suffix", "draft", "eagle3", "mtp"]
SchedulingPolicy = Literal["fcfs", "priority"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
ExpertExchangeName = Literal["auto", "all-reduce", "all-to-all"]
Quantization = Literal["auto", "fp8", "fp8-block", "int8", "int4"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"]


def _setting(group: str, default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help, "group": group})


# One function per group of `--help`.
_model = partial(_setting, "model")
_scheduling = partial(_setting, "scheduling")
_kv_cache = partial(_setting, "KV cache")
_speculation = partial(_setting, "speculative decoding")
_parallelism = partial(_setting, "several GPUs")
_kernels = partial(_setting, "kernels and graphs")
_debugging = partial(_setting, "debugging")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. Each field is also a keyword of `LLM` and a command-line flag.

    Raises:
        ConfigError: if a value is out of range, or two settings exclude each other.
    """

    model: str = _model(
        "demo", "model to load: a folder, a .gguf file, a Hugging Face id, demo or demo-draft"
    )
    revision: str | None = _model(None, "branch, tag or commit of the Hugging Face id")
    tokenizer: str | None = _model(None, "tokenizer folder or file (default: the model's tokenizer)")
    skip_tokenizer_init: bool = _model(False, "load no tokenizer: prompts and answers are token ids")
    load_format: LoadFormat = _model(
        "auto", "auto reads the checkpoint; dummy fills the model's shapes with random weights"
    )
    quantization: Quantization = _model(
        "auto",
        "format of the weights: auto is that of the checkpoint; fp8, fp8-block, int8 or int4 converts a checkpoint of "
        "plain weights while it is loaded",
    )
    dtype: Dtype = _model("auto", "number format of weights and activations; auto follows the checkpoint")
    device: str = _model("auto", "cpu, cuda or cuda:N; auto picks the first GPU, or the CPU if there is none")
    seed: int = _model(0, "seed of dummy weights, and of requests without a seed")

    batching: Batching = _scheduling(
        "continuous", "continuous admits requests at every step; static waits until the batch is empty"
    )
    max_num_seqs: int | None = _scheduling(
        None,
        "most requests in a batch (default: 1024 on a GPU of 64 GB or more, 256 on smaller GPUs, fewer if layers keep large states, 32 on a CPU)",
    )
    max_num_batched_tokens: int | None = _scheduling(
        None, "token budget of a step (default: 8192 on a GPU, 2048 on a CPU)"
    )
    chunked_prefill: bool | None = _scheduling(
        None, "split long prompts over several steps (default: on; off with kv_layout none)"
    )
    mixed_prefill_tokens: int | None = _scheduling(
        None,
        "prompt-token budget of steps that also decode: lower keeps inter-token latency even, higher lowers time to "
        "first token; a chunk counts for at least 32 tokens (default: 256 on a CPU; no limit on a GPU or with "
        "chunked_prefill off)",
    )
    target_itl: float | None = _scheduling(
        None,
        "target in ms for the 99th percentile of the inter-token latency: prompts run in the largest chunks with which steps "
        "are predicted to end in time; replaces mixed_prefill_tokens (default: off)",
    )
    scheduling_policy: SchedulingPolicy = _scheduling(
        "fcfs", "order of requests: fcfs (first come, first served) or priority (lower numbers first)"
    )
    overlap: bool = _scheduling(True, "schedule the next step while the device runs the current one")

    kv_layout: KVLayoutName = _kv_cache(
        "paged",
        "paged; contiguous (one block as long as the context); none (recompute the whole sequence at every step)",
    )
    kv_cache_dtype: KVCacheDtype = _kv_cache(
        "auto",
        "number format of keys and values: auto is that of activations; fp8 (the same as fp8_e4m3) and int8 take about "
        "half of 16 bits, with a scale for each token and head, or, with fp8, the checkpoint's scales if it has them",
    )
    block_size: int = _kv_cache(16, "tokens per block of the paged layout")
    max_model_len: int | None = _kv_cache(
        None, "longest prompt + output in tokens (default: what the model and the memory allow)"
    )
    kv_cache_memory: int | None = _kv_cache(
        None, "bytes for KV blocks (default: the memory that is left, as measured at start-up)"
    )
    memory_utilization: float = _kv_cache(
        0.9, "share of the device's memory that Quire may use if kv_cache_memory is not set"
    )
    prefix_caching: bool | None = _kv_cache(
        None, "reuse cached blocks of equal prompt prefixes (default: on; off with kv_layout none)"
    )
    eviction: Eviction = _kv_cache(
        "lru", "cached block to evict first: lru (least recently used) or fifo (first cached)"
    )
    kv_host_memory: float | None = _kv_cache(
        None,
        "GB of host memory for evicted blocks, which return when a prompt begins with them (default: none)",
    )
    kv_disk: str | None = _kv_cache(
        None, "folder for blocks behind kv_host_memory, kept over restarts; one engine at a time"
    )
    kv_disk_size: float = _kv_cache(
        64.0, "GB of kv_disk, beyond which the least recently used files are deleted"
    )
    cache_secret: str | None = _kv_cache(
        None,
        "secret in hexadecimal digits from which names of cached blocks derive: engines that exchange blocks share one "
        "(default: that of kv_disk, or a random one)",
    )
    state_snapshots: int | None = _kv_cache(
        None,
        "rows for snapshots of the states of linear attention, Mamba and convolutions, by which prefix_caching finds the "
        "end of a prefix (default: up to an eighth of the memory for the KV cache)",
    )
    state_snapshot_interval: int = _kv_cache(
        4096,
        "tokens between such snapshots in prompts, rounded up to blocks, besides those at the end of a prompt and where "
        "prompts diverge; 0 takes only these",
    )
    state_snapshot_answers: int = _kv_cache(
        64,
        "tokens between such snapshots in answers, rounded up to blocks, of which the latest one is kept for the next turn "
        "of a conversation; 0 takes none",
    )
    shared_prefix: bool = _kv_cache(
        True,
        "read the blocks of a prefix that decoding requests share once for all of them (attention triton)",
    )

    spec_method: SpecMethod = _speculation(
        "off",
        "guess the next tokens and verify several in one step, with the same output: ngram looks for the last tokens "
        "earlier in prompt and answer; suffix also in earlier answers of the same client; draft asks spec_model; "
        "eagle3 a draft head; mtp the layer for it in checkpoints of DeepSeek-V3 and GLM-4.5; off",
    )
    spec_model: str | None = _speculation(
        None,
        "draft model of spec_method draft, a small one with the same tokenizer, such as demo-draft for demo; draft head "
        "of eagle3",
    )
    spec_tokens: int | None = _speculation(
        None, "most draft tokens of a request in a step (default: 5 with a spec_method)"
    )
    spec_adaptive: bool = _speculation(
        True,
        "draft fewer tokens where they do not pay, by measured acceptance and step times; off always drafts spec_tokens",
    )
    speculative_config: dict[str, Any] | None = _speculation(
        None, 'the same settings as vLLM writes them: {"method": "ngram", "num_speculative_tokens": 5}'
    )

    tensor_parallel_size: int = _parallelism(
        1, "number of ranks, each with its own GPU or CPU process, that share every layer of the model"
    )
    pipeline_parallel_size: int = _parallelism(
        1, "number of stages with consecutive layers; each stage has tensor_parallel_size ranks"
    )
    pipeline_layer_split: str | None = _parallelism(
        None, "layers of each stage, such as 16,14 (default: stages of equally many bytes)"
    )
    data_parallel_size: int = _parallelism(
        1,
        "number of replicas of the model, each in its own process with its own GPUs, that share the requests",
    )
    disaggregate: str | None = _parallelism(
        None,
        "engines that only compute prompts, and engines that only decode, such as prefill:1,decode:1; a multiple of "
        "prefill engines belongs to each decode engine",
    )
    rank_address: str | None = _parallelism(
        None,
        "HOST:PORT of this host at which the other ranks connect from other hosts, started there with `quire rank "
        "HOST:PORT` (default: all ranks are on this host)",
    )
    rank_token: str | None = _parallelism(
        None, "secret that ranks of other hosts must present (also QUIRE_RANK_TOKEN)"
    )
    enable_expert_parallel: bool = _parallelism(
        False,
        "give each rank of tensor parallelism whole experts instead of a part of every expert",
    )
    expert_exchange: ExpertExchangeName = _parallelism(
        "auto",
        "with expert parallelism, how tokens and experts come together: all-reduce, all-to-all, or auto, which sends "
        "fewer bytes; all-to-all on a GPU needs cuda_graphs off",
    )
    rank_timeout: float = _parallelism(
        60.0, "seconds without progress after which a rank counts as hung and the engine ends"
    )

    attention: str = _kernels(
        "auto",
        "attention back end: auto, reference, triton or cpu; auto picks triton on a GPU, cpu with cpu_kernels, else "
        "reference",
    )
    cuda_graphs: bool = _kernels(True, "capture steps as CUDA graphs and replay them, on a GPU")
    capture_at_start: bool = _kernels(
        True,
        "capture the most common steps before the first request: off starts about a second sooner, but the first "
        "minute is slower",
    )
    cpu_kernels: bool = _kernels(
        True, "run small steps on a CPU with C kernels, which are compiled at the first start"
    )
    cpu_replay: bool = _kernels(
        True, "with cpu_kernels, capture steps of up to 8 rows and replay each as one call"
    )
    cpu_threads: int | None = _kernels(
        None, "threads of a step on a CPU (default: all cores, or one for a small step)"
    )

    check_invariants: bool = _debugging(
        False, "check the scheduler's data structures after every step (slow; for tests)"
    )

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            if self.spec_method != "off":
                raise ConfigError("speculative_config and spec_method say the same thing; give one")
            for name, value in settings_of(self.speculative_config).items():
                object.__setattr__(self, name, value)
            object.__setattr__(self, "speculative_config", None)
        if self.rank_address is not None and self.rank_token is None:
            object.__setattr__(self, "rank_token", os.environ.get("QUIRE_RANK_TOKEN"))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        for name in ("state_snapshot_interval", "state_snapshot_answers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name} must be an integer of at least 0, got {value!r}")
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"memory_utilization must be in (0, 1], got {self.memory_utilization}")
        for name in ("kv_host_memory", "kv_disk_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be above 0 GB, got {value}")
        if self.cache_secret is not None and not _is_secret(self.cache_secret):
            raise ConfigError("cache_secret must be 32 to 128 hexadecimal digits, two for each byte")
        if not self.rank_timeout > 0:
            raise ConfigError(f"rank_timeout must be above 0 seconds, got {self.rank_timeout}")
        if self.disaggregate is not None:
            _, decodes = parse_disaggregation(self.disaggregate)
            if self.data_parallel_size not in (1, decodes):
                raise ConfigError(
                    f"disaggregate {self.disaggregate} has {decodes} decode engines, but data_parallel_size is "
                    f"{self.data_parallel_size}; leave one out"
                )
            object.__setattr__(self, "data_parallel_size", decodes)
        if self.pipeline_layer_split is not None:
            parse_layer_split(self.pipeline_layer_split, self.pipeline_parallel_size)
        for illegal, message in ILLEGAL:
            if illegal(self):
                raise ConfigError(message.format(c=self))

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute, each with its own GPU if there are GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_prefills(self) -> int:
        """Number of prefill engines of each decode engine; 0 without disaggregation."""
        if self.disaggregate is None:
            return 0
        prefills, decodes = parse_disaggregation(self.disaggregate)
        return prefills // decodes

    def resolved(self, gpu_bytes: int, model_max_len: int, state_bytes: int = 0) -> EngineConfig:
        """Return these settings with the automatic values that need no loaded model.

        Args:
            gpu_bytes: memory of the GPU; 0 for a CPU.
            model_max_len: longest context of the model in tokens.
            state_bytes: bytes that the layers keep of each request, besides KV blocks.

        Raises:
            ConfigError: if chunked_prefill is off and a step cannot hold the longest prompt.
        """
        recompute = self.kv_layout == "none"
        chunked = not recompute if self.chunked_prefill is None else self.chunked_prefill
        max_len = min(self.max_model_len or model_max_len, model_max_len)
        budget = self.max_num_batched_tokens or (8192 if gpu_bytes else 2048)
        if not chunked and budget < max_len:
            if self.max_num_batched_tokens:
                raise ConfigError(
                    f"max_num_batched_tokens ({budget}) must be at least max_model_len ({max_len}) if "
                    "chunked_prefill is off, because a prompt then runs in one step; raise it or lower max_model_len"
                )
            budget = max_len
        spec_tokens = None
        if self.spec_method != "off":
            spec_tokens = min(self.spec_tokens or _SPEC_TOKENS, max_len - 1)
        return replace(
            self,
            chunked_prefill=chunked,
            prefix_caching=not recompute if self.prefix_caching is None else self.prefix_caching,
            max_num_seqs=self.max_num_seqs
            or _default_seqs(gpu_bytes, state_bytes * (1 + (spec_tokens or 0))),
            max_num_batched_tokens=budget,
            mixed_prefill_tokens=min(self.mixed_prefill_tokens or (budget if gpu_bytes else 256), budget)
            if chunked and self.target_itl is None
            else None,
            max_model_len=max_len,
            block_size=self.block_size if self.kv_layout == "paged" else max_len,
            spec_tokens=spec_tokens,
        )


def replica_config(config: EngineConfig, replica: int) -> EngineConfig:
    """Return the settings of one replica of `config`: the GPUs behind those of the replicas before it.

    `auto:N` is GPU N, or the CPU where there is no GPU. Ranks of other hosts connect to one port for each replica.
    """
    if config.kv_disk is not None and config.data_parallel_size > 1:  # files of one engine each
        config = replace(config, kv_disk=os.path.join(config.kv_disk, f"replica-{replica}"))
    if config.rank_address is not None:
        host, _, port = config.rank_address.rpartition(":")
        return replace(config, rank_address=f"{host}:{int(port) + replica}")
    kind, _, first = config.device.partition(":")
    gpu = int(first or 0) + replica * config.tensor_parallel_size
    return replace(config, device=f"{kind}:{gpu}") if gpu and kind != "cpu" else config


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


def _default_seqs(gpu_bytes: int, state_bytes: int) -> int:
    if not gpu_bytes:
        return 32
    rows = 1024 if gpu_bytes >= 64_000_000_000 else 256
    # The states of all requests are allocated at the start, and take a sixth of the memory at most.
    return max(1, min(rows, gpu_bytes // (6 * state_bytes))) if state_bytes else rows


_SPEC_TOKENS = 5
_COUNTS = (
    "block_size",
    "max_num_batched_tokens",
    "mixed_prefill_tokens",
    "max_num_seqs",
    "max_model_len",
    "kv_cache_memory",
    "cpu_threads",
    "spec_tokens",
    "state_snapshots",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "batching": get_args(Batching),
    "kv_layout": get_args(KVLayoutName),
    "eviction": get_args(Eviction),
    "scheduling_policy": get_args(SchedulingPolicy),
    "spec_method": get_args(SpecMethod),
    "dtype": get_args(Dtype),
    "load_format": get_args(LoadFormat),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVCacheDtype),
    "expert_exchange": get_args(ExpertExchangeName),
    "attention": ("auto", "reference", "triton", "cpu"),
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
        lambda c: c.spec_method in ("draft", "eagle3") and c.spec_model is None,
        "spec_method {c.spec_method} needs a spec_model; add --spec-model with a draft model that has the tokenizer of the "
        "model, or with an EAGLE-3 head for eagle3",
    ),
    (
        lambda c: c.spec_method not in ("draft", "eagle3") and c.spec_model is not None,
        "spec_model {c.spec_model} needs a spec_method that uses it, got {c.spec_method}; add --spec-method draft, or "
        "eagle3 for an EAGLE-3 head",
    ),
    (
        lambda c: c.pipeline_parallel_size > 1 and c.spec_method not in ("off", "ngram", "draft"),
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


def env_flag(name: str) -> bool:
    """Return whether the environment variable `name` is 1, true, yes or on, in any case."""
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


def triton_interpreted() -> bool:
    """Return whether Triton interprets its kernels, so that they run (slowly) without a GPU."""
    return env_flag("TRITON_INTERPRET")
