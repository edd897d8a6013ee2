"""The composition root: settings in, a finished engine out. The only module that looks at feature
settings; everything below it is handed objects. Times each phase of the start-up.

On a GPU weights are read by threads while this one goes on: memory is measured, blocks are allocated and
kernels are compiled with whatever the weights hold so far. (`start.py` is the way in for callers that have
not imported torch.)
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from quire.attention.base import AttentionBackend
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.config import EngineConfig, triton_interpreted
from quire.core.engine import Engine
from quire.core.grammar_interface import Grammar, NoGrammar
from quire.frontend.location import locate_model, locate_tokenizer
from quire.grammar.checker import Checker
from quire.grammar.compiler import Compiler
from quire.grammar.library import LibraryGrammar
from quire.kernels import Kernels, pick_kernels
from quire.kernels.cpu.ops import CpuKernels
from quire.kernels.target import OLDEST, target_of
from quire.layers.env import Env
from quire.models.checkpoint.checked import CheckedCheckpoint
from quire.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from quire.models.config.load import load_spec
from quire.models.decoder import Model
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from quire.types import ConfigError, EngineInfo
from quire.wiring import queue_depth, wire_engine
from quire.worker.executor import DeviceGuard, LocalExecutor, device_guard
from quire.worker.sizing import (
    KVSize,
    check_kv_fits,
    check_weights_fit,
    fit_context,
    gpu_memory,
    kv_budget,
    size_kv,
    with_context,
)
from quire.worker.worker import Worker

log = logging.getLogger("quire")


def build_engine(config: EngineConfig, imports_s: float = 0.0) -> tuple[Engine, EngineInfo]:
    """Load the model and wire an engine. Raises ConfigError or ModelError with one sentence for the user.

    `imports_s`: how long the caller waited for this module; it becomes part of the times.
    """
    clock = _Phases(imports_s)
    path = locate_model(config.model, config.revision).path
    spec = load_spec(path)
    clock.end("config")
    device = pick_device(config.device)
    guard = device_guard(device)
    with guard():
        return _build(config, path, spec, device, guard, clock)


def _build(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    device: torch.device,
    guard: DeviceGuard,
    clock: _Phases,
) -> tuple[Engine, EngineInfo]:
    dtype = pick_dtype(config.dtype, spec, device)
    if (asked_len := config.max_model_len) is not None and asked_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {asked_len} exceeds the {spec.max_model_len} positions of {config.model}"
        )
    config = config.resolved(gpu_memory(device), spec.max_model_len)
    wanted_len = config.max_model_len or 1
    config = shortened(config, asked_len, spec, dtype, device)
    # Tables for positions and columns for tokens are made for the context that can be served.
    spec = replace(spec, max_model_len=config.max_model_len or 1)
    kernels = pick_kernels(device, dtype, config.cpu_kernels)
    backend = pick_attention(config.attention, spec, device, dtype, kernels)
    clock.end("device")

    model, checkpoint = load_model(config, path, spec, backend, kernels, device, dtype)
    with closing(checkpoint):
        worker = Worker(config, model, backend, device, dtype, queue_depth(config), kernels)
        clock.end("weights")
        worker.compile_kernels()
        clock.end("warm_up")
        size = plan_kv(config, asked_len, worker, spec, dtype)
        if size.max_model_len < wanted_len:
            log.warning(
                "max_model_len lowered from %d to %d, for which there is memory",
                wanted_len,
                size.max_model_len,
            )
        runner = worker.allocate(size)
        clock.end("kv_cache")
        if device.type == "cuda":  # a CPU has nothing to compile
            worker.rehearse(runner, size)
        engine = wire_engine(
            config,
            size.num_blocks,
            size.block_size,
            size.max_model_len,
            LocalExecutor(runner, guard),
            pick_grammar(config, path, spec.vocab_size),
            config.shared_prefix and backend.reads_shared,
        )
        _freeze_garbage()
        clock.end("warm_up")
        checkpoint.finish()
        clock.end("weights")
    return engine, _describe(config, spec, size, worker, dtype, backend.name, clock.phases_s)


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: if there is no such device, or Quire does not support it.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device here")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {name!r} was asked for, but there are {torch.cuda.device_count()} GPUs"
            )
        device = torch.device("cuda", device.index or 0)
        _refuse_unsupported(device)
        # cuDNN's attention plans anew, for some 50 ms, at every length that it has not seen; rows grow by one.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _refuse_unsupported(device: torch.device) -> None:
    if torch.version.hip is not None:  # torch calls AMD's GPUs cuda as well
        raise ConfigError(
            f"device {str(device)!r} is an AMD GPU (ROCm {torch.version.hip}), which Quire does not support; "
            "use an NVIDIA GPU or device cpu"
        )
    target = target_of(device)
    if target.capability < OLDEST:
        raise ConfigError(
            f"{target} is too old: Quire needs compute capability {OLDEST // 10}.{OLDEST % 10} or later; "
            "use a newer GPU or device cpu"
        )


def pick_dtype(asked: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the number format of weights and activations; `auto` follows the checkpoint where the device can.

    A GPU without bfloat16 takes float16, or float32 for models whose activations exceed the range of float16. A CPU
    has no fast path for float16 and takes float32.

    Raises:
        ConfigError: if `asked` is bfloat16 and the device lacks it.
    """
    name = spec.dtype if asked == "auto" else asked
    if name == "bfloat16" and device.type == "cuda" and not (target := target_of(device)).has_bf16:
        instead = "float32" if spec.family in _WIDE_RANGE else "float16"
        if asked == "bfloat16":
            raise ConfigError(
                f"dtype bfloat16 needs an NVIDIA GPU since Ampere, got {target}; use dtype {instead}"
            )
        log.warning("dtype %s, because %s has no bfloat16", instead, target)
        name = instead
    if name == "float16" and spec.family in _WIDE_RANGE:
        log.warning("%s models exceed the range of float16; bfloat16 or float32 are safe", spec.family)
    if name == "float16" and device.type == "cpu":
        if asked == "float16":
            log.warning("float16 is slow on a CPU; bfloat16 or float32 are faster")
        else:
            name = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


_WIDE_RANGE = ("gemma3",)  # families trained in bfloat16 whose activations overflow float16


def pick_attention(
    name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kernels: Kernels | None
) -> AttentionBackend:
    """Return the attention called `name`; `auto` takes kernels where they run fast.

    Those are the ones in Triton on a GPU, if it is installed and the heads fit, and those in C on a CPU.
    """
    if isinstance(kernels, CpuKernels) and name in ("auto", "cpu"):
        return CpuAttention(kernels)
    if name == "cpu":
        raise ConfigError(
            "attention cpu needs a CPU, fp32 or bf16, cpu_kernels, and a C compiler to build them"
        )
    installed = find_spec("triton") is not None
    if name == "reference" or (name == "auto" and not (installed and device.type == "cuda")):
        return ReferenceAttention()
    if not installed:
        raise ConfigError("attention triton was asked for, but the package triton is not installed")
    if device.type != "cuda" and not triton_interpreted():
        raise ConfigError(f"attention triton needs a CUDA device, but the device is {device}")
    # Imported here: an installation for CPUs has no Triton.
    from quire.attention.triton import TritonAttention

    target, group = target_of(device), spec.num_heads // spec.num_kv_heads
    if not TritonAttention.fits(spec.head_dim, dtype.itemsize, group, target):
        fault = f"{dtype.itemsize * 8}-bit heads of {spec.head_dim} need more shared memory than {target} has"
        if name == "triton":
            raise ConfigError(f"attention triton cannot run: {fault}; use attention reference")
        log.warning("attention reference, which is slower: %s", fault)
        return ReferenceAttention()
    return TritonAttention()


def load_model(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    backend: AttentionBackend,
    kernels: Kernels | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Model, Checkpoint]:
    """The model on `device`, and the checkpoint, which must be finished before the weights can be relied on."""
    checkpoint: Checkpoint = CheckedCheckpoint(
        open_checkpoint(path, spec, config.load_format, device=device, dtype=dtype, seed=config.seed)
    )
    try:
        with torch.inference_mode():
            return build_model(spec, Env(checkpoint, Parallel(), backend, device, dtype, kernels)), checkpoint
    except BaseException:
        checkpoint.close()
        raise


def shortened(
    config: EngineConfig, asked_len: int | None, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> EngineConfig:
    """Lower max_model_len to what the memory holds beside the weights, before anything is sized by it.

    Raises ConfigError if the weights do not fit, or no context does.
    """
    weights = check_weights_fit(config, spec, dtype, device)
    budget = kv_budget(config, device, weights)
    return with_context(config, fit_context(config, asked_len, spec, dtype, budget))


def plan_kv(
    config: EngineConfig, asked_len: int | None, worker: Worker, spec: ModelSpec, dtype: torch.dtype
) -> KVSize:
    reserved = worker.measure()
    budget = kv_budget(config, worker.device, reserved)
    size = size_kv(config, asked_len, spec, dtype, budget, worker.device)
    check_kv_fits(config, size, worker.device, reserved)
    return size


def pick_grammar(config: EngineConfig, model: Path, vocab_size: int) -> Grammar:
    """Structured output, which needs to know what tokens read as. Nothing is loaded before it is asked for."""
    if config.skip_tokenizer_init:
        return NoGrammar()
    if sys.platform == "win32":
        return NoGrammar(
            "Linux or macOS: a specification is compiled in a forked process, which Windows lacks"
        )
    tokenizer = model if config.tokenizer is None else locate_tokenizer(config.tokenizer, config.revision)
    return LibraryGrammar(Compiler(Checker(tokenizer, vocab_size)), vocab_size)


def _describe(
    config: EngineConfig,
    spec: ModelSpec,
    size: KVSize,
    worker: Worker,
    dtype: torch.dtype,
    attention: str,
    phases_s: dict[str, float],
) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        family=spec.family,
        vocab_size=spec.vocab_size,
        max_model_len=size.max_model_len,
        eos_ids=list(spec.eos_token_ids),
        generates=spec.has_head,
        device=str(worker.device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        max_num_seqs=config.max_num_seqs or 0,
        max_num_batched_tokens=config.max_num_batched_tokens or 0,
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        block_bytes=size.block_bytes,
        weight_bytes=spec.num_parameters * dtype.itemsize,
        num_parameters=spec.num_parameters,
        reserved_bytes=worker.reserved_bytes,
        prefix_caching=bool(config.prefix_caching),
        eviction=config.eviction,
        phases_s=phases_s,
    )


def _freeze_garbage() -> None:
    """What exists now lives as long as the engine: keep the collector from walking it in every pass."""
    gc.collect()
    gc.freeze()


class _Phases:
    """Wall time by phase; a phase may come in several parts."""

    def __init__(self, imports_s: float) -> None:
        self.phases_s = {"import": imports_s}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.phases_s[name] = self.phases_s.get(name, 0.0) + now - self._last
        self._last = now
