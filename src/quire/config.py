"""Settings of an engine: one frozen dataclass and one place for defaults. `config_rules.py` says which are legal.

A field that is None means "automatic". `EngineConfig.resolved` fills in the values that depend on other fields;
`rank.py` and `assembly/` fill in those that depend on the model and the machine. Only this file and `cli/` read the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.config_rules import (
    Batching,
    DecodeAttention,
    Dtype,
    Eviction,
    ExpertExchangeName,
    KVCacheDtype,
    KVLayoutName,
    KVTransport,
    LayerBackend,
    LoadFormat,
    PrefillAttention,
    Quantization,
    SchedulingPolicy,
    SpecMethod,
    check_combinations,
    check_values,
    parse_disaggregation,
)
from quire.types import ConfigError
from quire.types.speculative import settings_of

# OpenMP threads that wait for each other spin by default. If another process uses one of the cores, that costs a time
# slice of the operating system (milliseconds) at each of the hundreds of barriers in a step. Spinning for 0.2 to 0.5 ms
# and then sleeping is as fast alone, and fast beside a busy process too. A tenth of it puts threads to sleep between the
# layers of a step, which doubles its time. The variable must be set before torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


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
        "are predicted to end in time, and no more requests than decode in time; replaces mixed_prefill_tokens (default: off)",
    )
    target_ttft: float | None = _scheduling(
        None,
        "target in ms for the time to first token: requests are admitted in the order in which their first token is due, "
        "and --shed refuses those that are predicted to miss it (default: off)",
    )
    prefill_slowdown: float | None = _scheduling(
        None,
        "longest step with prompts, as a multiple of a step that only decodes; target_ttft takes precedence "
        "(default: 3.5 in quire serve, otherwise off; inf for no limit)",
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
        "eagle and eagle3 a draft head; mtp the layer for it in checkpoints of DeepSeek-V3 and GLM-4.5; off",
    )
    spec_model: str | None = _speculation(
        None,
        "draft model of spec_method draft, a small one with the same tokenizer, such as demo-draft for demo; draft head "
        "of eagle or eagle3",
    )
    spec_quantization: Quantization = _speculation(
        "auto",
        "format of the weights of spec_model: auto is that of its checkpoint; fp8, fp8-block, int8 or int4 converts plain "
        "weights while they are loaded, which changes drafts but no output",
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
    kv_transport: KVTransport = _parallelism(
        "auto",
        "how a decode engine copies the blocks of its prefill engines: shared-memory on a CPU, cuda-ipc on a GPU (the "
        "prefill engine's memory is mapped into its process), or auto, which picks by device",
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
    prefill_attention: PrefillAttention = _kernels(
        "auto",
        "back end for rows of several new tokens: auto is that of attention; reference gathers keys and values for each "
        "row; library is PyTorch's FlashAttention over gathered rows, on a GPU; triton; with latent attention absorbed reads "
        "latents as they are; expanded, which auto picks, computes keys and values where that takes fewer operations",
    )
    decode_attention: DecodeAttention = _kernels(
        "auto",
        "back end for rows of one new token: auto, reference, library, triton, or cpu for the C kernel",
    )
    decode_splits: int | None = _kernels(
        None,
        "most programs that share the context of one decoding row (attention triton; default: as many as fill the GPU; "
        "1 is unsplit decoding)",
    )
    norm_backend: LayerBackend = _kernels(
        "auto",
        "norms: auto uses Quire's kernels, which fuse them with products; library PyTorch's functions; reference basic "
        "operations",
    )
    mlp_backend: LayerBackend = _kernels(
        "auto",
        "products and activations of MLPs: auto uses Quire's kernels for few rows; library cuBLAS or oneDNN and "
        "PyTorch's activations; reference the same products and basic operations",
    )
    cuda_graphs: bool = _kernels(True, "capture steps as CUDA graphs and replay them, on a GPU")
    capture_at_start: bool = _kernels(
        True,
        "capture the most common steps before the first request: off starts about a second sooner, but the first "
        "minute is slower",
    )
    compile_processes: int | None = _kernels(
        None,
        "processes that compile kernels before the first request, on a GPU under Linux (default: one per core, at most "
        "16; 0 compiles in threads)",
    )
    persistent_kernel: bool = _kernels(
        True,
        "run decode steps of 1, 2 or 4 rows as one kernel: dense Llama and Qwen models in bf16, FP8 or INT4 on a Hopper GPU",
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
        check_values(self)
        if self.disaggregate is not None:
            object.__setattr__(self, "data_parallel_size", parse_disaggregation(self.disaggregate)[1])
        check_combinations(self)

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

    @property
    def learns_step_times(self) -> bool:
        """Return whether the engine predicts the time of steps, for the latency targets."""
        wanted = (self.target_itl, self.target_ttft, self.prefill_slowdown)
        return any(value is not None for value in wanted)

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


def _default_seqs(gpu_bytes: int, state_bytes: int) -> int:
    if not gpu_bytes:
        return 32
    rows = 1024 if gpu_bytes >= 64_000_000_000 else 256
    # The states of all requests are allocated at the start, and take a sixth of the memory at most.
    return max(1, min(rows, gpu_bytes // (6 * state_bytes))) if state_bytes else rows


_SPEC_TOKENS = 5


def env_flag(name: str) -> bool:
    """Return whether the environment variable `name` is 1, true, yes or on, in any case."""
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


def triton_interpreted() -> bool:
    """Return whether Triton interprets its kernels, so that they run (slowly) without a GPU."""
    return env_flag("TRITON_INTERPRET")
