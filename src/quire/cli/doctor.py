"""`quire doctor`: show what this machine has, what Quire will use for a model, and why."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING

from quire import __version__
from quire.cli.flags import add_flags, given
from quire.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from quire.kernels import Kernels
    from quire.worker.memory.sizing import MemoryPlanner

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "sentencepiece",
    "jinja2",
    "huggingface_hub",
    "gguf",
    "msgspec",
)

_KERNELS = {"cuda": "Triton", "cpu": "C, for small steps"}
_SWITCHES = (
    "batching", "kv_layout", "chunked_prefill", "prefix_caching", "eviction", "scheduling_policy", "overlap",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire doctor`."""
    parser.add_argument("--load", action="store_true", help="also start the engine and time each phase")
    add_flags(parser, "engine", EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    config = EngineConfig(**given(args, EngineConfig))
    _section("Versions")
    _row("quire", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            _row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            _row(name, "not installed" + (" (only needed on a GPU)" if name == "triton" else " - MISSING"))
    begin = time.perf_counter()
    import quire.build  # noqa: F401  (imports torch, which is timed here)

    imports_s = time.perf_counter() - begin
    _machine()
    _plan(config)
    if args.load:
        _load(config, imports_s)
    return 0


def _machine() -> None:
    import psutil
    import torch

    from quire.kernels.target import target_of
    from quire.worker.memory.host_memory import host_memory

    _section("Machine")
    available, total = host_memory()
    cores = f"{psutil.cpu_count(logical=False) or '?'} cores, {torch.get_num_threads()} threads used by torch"
    _row("cpu", f"{cores}, {torch.backends.cpu.get_cpu_capability()}")
    limited = "" if total == psutil.virtual_memory().total else " (limited by the container or ulimit)"
    _row("memory", f"{_size(total)}{limited}, {_size(available)} available")
    if not torch.cuda.is_available():
        _row(
            "gpu",
            "none that torch can use"
            + ("" if torch.version.cuda else " (a CPU build of torch is installed)"),
        )
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        target = target_of(torch.device("cuda", index))
        parts = f"{target.sms} multiprocessors with {_size(target.shared_bytes)} of shared memory"
        _row(f"cuda:{index}", f"{target}, {_size(total)}, {_size(free)} free, {parts}")


def _plan(config: EngineConfig) -> None:
    from quire.build import memory_planner, pick_attention, pick_device, pick_dtype
    from quire.frontend.location import locate_model
    from quire.kernels import pick_kernels
    from quire.models.config.load import load_spec
    from quire.worker.memory.sizing import gpu_memory

    device = pick_device(config.device)
    spec = load_spec(locate_model(config.model, config.revision).path)
    dtype = pick_dtype(config.dtype, spec, device)
    resolved = config.resolved(gpu_memory(device), spec.max_model_len)
    _section(f"Plan for {config.model}")
    _row("model", f"{spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters, {spec.num_layers} layers")
    gpu_state = "a GPU is available" if device.type == "cuda" else "no GPU is available"
    _row("device", f"{device}: {_why(config.device, gpu_state)}")
    _row("dtype", f"{str(dtype)[6:]}: {_why(config.dtype, f'the checkpoint is {spec.dtype}')}")
    kernels = pick_kernels(device, dtype, config.cpu_kernels)
    _row("kernels", _kernels(kernels, spec.hidden_size, dtype, device))
    backend = pick_attention(config.attention, spec, device, dtype, kernels).name
    _row(
        "attention", f"{backend}: {_why(config.attention, 'the kernels above' if kernels else 'plain torch')}"
    )
    for name in _SWITCHES:
        _row(name, str(getattr(resolved, name)))
    _row("max_num_seqs", f"{resolved.max_num_seqs} requests at once")
    _row("max_num_batched_tokens", f"{resolved.max_num_batched_tokens} tokens per step")
    _memory_map(memory_planner(resolved, spec, dtype, device, explicit_len=config.max_model_len is not None))


def _kernels(kernels: Kernels | None, width: int, dtype: torch.dtype, device: torch.device) -> str:
    """Describe the kernels of small steps.

    A weight of [width, width] is packed to see whether the CPU kernels can read the format of this oneDNN.
    """
    if kernels is None:
        return "none, plain torch"
    if device.type == "cpu":
        import torch

        from quire.quant.packed import FewRowsPackedMatmul, pack

        probe = torch.arange(width * width, dtype=torch.float32).view(width, width).to(dtype)
        if not isinstance(pack(probe, None, kernels), FewRowsPackedMatmul):
            return "C, but torch computes matrix products, which is slower: the weight format of this oneDNN is unknown"
    return _KERNELS[device.type]


def _memory_map(memory: MemoryPlanner) -> None:
    weights, step = memory.check_weights_fit(), memory.cpu_step_bytes()
    size = memory.size_kv(memory.kv_budget(weights + step))
    _section("Memory map (before loading)")
    _row("weights", _size(weights))
    _row("slot columns", _size(memory.column_bytes(size.max_model_len)))
    _row("largest step", f"{_size(step)} (estimated; a GPU measures it)")
    blocks = f"{size.num_blocks} blocks of {size.block_size} tokens, {_size(size.block_bytes)} each"
    _row("kv cache", f"{_size(size.num_blocks * size.block_bytes)}: {blocks}")
    requests = size.num_blocks * size.block_size // size.max_model_len
    _row("context", f"{size.max_model_len} tokens; room for {requests} requests of full length at once")


def _load(config: EngineConfig, imports_s: float) -> None:
    from quire.build import build_engine

    engine, info = build_engine(config, imports_s)
    engine.close()
    _section("Start-up")
    for phase, seconds in info.phases_s.items():
        _row(phase, f"{seconds:.2f} s")
    _row("total", f"{sum(info.phases_s.values()):.2f} s")


def _why(setting: str, reason: str) -> str:
    return reason if setting == "auto" else "as set"


def _section(title: str) -> None:
    print(f"\n{title}" if title != "Versions" else title, file=sys.stdout)


def _row(name: str, value: str) -> None:
    print(f"  {name:<24}{value}")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
