"""`quire doctor`: show what this machine has, what Quire will use for a model, and why."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.cli.flags import add_flags, add_model, engine_settings
from quire.config import EngineConfig
from quire.types import QuireError

if TYPE_CHECKING:
    import torch

    from quire.kernels import Kernels
    from quire.quant.spec import QuantSpec
    from quire.types import KVCodes
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
    add_model(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: sections, their rows, and sizes in bytes"
    )
    parser.add_argument("--load", action="store_true", help="also start the engine and time each phase")
    add_flags(parser, "engine", EngineConfig)


class Report:
    """Rows by section: printed at once as text, or kept for one JSON object at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.sections: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, Any] = {}

    def section(self, title: str, key: str) -> None:
        """Begin a section. It is called `key` in JSON."""
        if not self._as_json:
            print(f"\n{title}" if self.sections else title)
        self._rows = self.sections.setdefault(key, {})

    def row(self, name: str, text: str, value: Any = None) -> None:
        """Add a row. In JSON it holds `value` instead of `text` if that is given."""
        self._rows[name] = text if value is None else value
        if not self._as_json:
            print(f"  {name:<24}{text}")

    def size(self, name: str, count: float, more: str = "") -> None:
        """Add a row with a number of bytes."""
        self.row(
            name,
            _size(count) + more,
            {"bytes": int(count), **({"detail": more.lstrip(" :,")} if more else {})},
        )


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    config = EngineConfig(**engine_settings(args))
    report = Report(args.json)
    if not args.json:
        _fill(report, config, args.load)
        return 0
    try:
        _fill(report, config, args.load)
    except QuireError as error:
        print(json.dumps({**report.sections, "error": str(error)}, indent=1))
        raise
    print(json.dumps(report.sections, indent=1))
    return 0


def _fill(report: Report, config: EngineConfig, load: bool) -> None:
    report.section("Versions", "versions")
    system = f"Python {platform.python_version()}, {platform.platform()}"
    report.row("quire", f"{__version__} on {system}", {"version": __version__, "system": system})
    for name in _PACKAGES:
        try:
            report.row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            report.row(
                name, "not installed" + (" (only needed on a GPU)" if name == "triton" else " - MISSING")
            )
    begin = time.perf_counter()
    import quire.host  # noqa: F401  (imports torch, which is timed here)

    imports_s = time.perf_counter() - begin
    _models(report)
    _machine(report)
    _plan(report, config)
    if load:
        _load(report, config, imports_s)


def _models(report: Report) -> None:
    from quire.models.config.hf import parsers

    report.section("Models", "models")
    names = sorted(name for name in parsers() if name[0].isupper() and not name.endswith("Model"))
    report.row("architectures", ", ".join(names), names)


def _machine(report: Report) -> None:
    import psutil
    import torch

    from quire.kernels.target import target_of
    from quire.worker.memory.host_memory import host_memory

    report.section("Machine", "machine")
    available, total = host_memory()
    cores = f"{psutil.cpu_count(logical=False) or '?'} cores, {torch.get_num_threads()} threads used by torch"
    report.row("cpu", f"{cores}, {torch.backends.cpu.get_cpu_capability()}")
    limited = "" if total == psutil.virtual_memory().total else " (limited by the container or ulimit)"
    memory = {"total_bytes": total, "available_bytes": available, "limited": bool(limited)}
    report.row("memory", f"{_size(total)}{limited}, {_size(available)} available", memory)
    if not torch.cuda.is_available():
        report.row(
            "gpu",
            "none that torch can use"
            + ("" if torch.version.cuda else " (a CPU build of torch is installed)"),
        )
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        target = target_of(torch.device("cuda", index))
        parts = f"{target.sms} multiprocessors with {_size(target.shared_bytes)} of shared memory"
        text = f"{target}, {_size(total)}, {_size(free)} free, {parts}"
        report.row(
            f"cuda:{index}", text, {"gpu": f"{target}, {parts}", "total_bytes": total, "free_bytes": free}
        )


def _plan(report: Report, config: EngineConfig) -> None:
    from quire.assembly.device import pick_device, pick_dtype
    from quire.assembly.drafting import find_draft
    from quire.assembly.kv_codes import kv_coded_spec
    from quire.assembly.memory import memory_planner, request_state_bytes
    from quire.assembly.model import served_spec
    from quire.assembly.parts import pick_attention_parts
    from quire.frontend.location import locate_model
    from quire.kernels import pick_kernels
    from quire.models.config.load import load_spec
    from quire.worker.memory.sizing import gpu_memory

    device = pick_device(config.device)
    path = locate_model(config.model, config.revision).path
    spec = served_spec(config, load_spec(path))
    dtype = pick_dtype(config.dtype, spec, device)
    spec = kv_coded_spec(config, path, spec, dtype, device)
    states = request_state_bytes(spec, dtype, config.tensor_parallel_size)
    drafts = find_draft(config, path, spec)
    longest = min([spec.max_model_len, *(draft.max_model_len for draft in drafts)])
    resolved = config.resolved(gpu_memory(device), longest, states)
    report.section(f"Plan for {config.model}", "plan")
    report.row(
        "model", f"{spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters, {spec.num_layers} layers"
    )
    gpu_state = "a GPU is available" if device.type == "cuda" else "no GPU is available"
    report.row("device", f"{device}: {_why(config.device, gpu_state)}")
    report.row("dtype", f"{str(dtype)[6:]}: {_why(config.dtype, f'the checkpoint is {spec.dtype}')}")
    kernels = pick_kernels(device, dtype, config.cpu_kernels)
    report.row("kernels", _kernels(kernels, spec.hidden_size, dtype, device))
    report.row("quantization", _quantization(spec.quantization, kernels, dtype, device))
    backend = pick_attention_parts(config, spec, device, dtype, kernels).name
    report.row(
        "attention", f"{backend}: {_why(config.attention, 'the kernels above' if kernels else 'plain torch')}"
    )
    report.row("kv_cache_dtype", _kv_codes(spec.kv_codes, dtype))
    for name in _SWITCHES:
        report.row(name, str(getattr(resolved, name)), getattr(resolved, name))
    report.row("max_num_seqs", f"{resolved.max_num_seqs} requests at once", resolved.max_num_seqs)
    tokens = resolved.max_num_batched_tokens
    report.row("max_num_batched_tokens", f"{tokens} tokens per step", tokens)
    memory = memory_planner(
        resolved, path, spec, dtype, device, explicit_len=config.max_model_len is not None, drafts=drafts
    )
    _memory_map(report, memory)


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


def _quantization(
    spec: QuantSpec | None, kernels: Kernels | None, dtype: torch.dtype, device: torch.device
) -> str:
    """Describe the format of the weights, and what multiplies with them."""
    from quire.quant.products import stays_packed

    if spec is None:
        return "none, plain numbers"
    if spec.unsupported:
        return f"{spec}, which cannot be read: {spec.unsupported}"
    if not stays_packed(device, kernels is not None, spec.is_fp8):
        return f"{spec}, unpacked and computed in {str(dtype)[6:]}"
    by = "plain torch" if kernels is None else "C kernels" if device.type == "cpu" else "Triton kernels"
    return f"{spec}, multiplied by {by}"


def _kv_codes(codes: KVCodes | None, dtype: torch.dtype) -> str:
    """Describe how keys and values are stored."""
    if codes is None:
        return str(dtype).removeprefix("torch.")
    scales = "the checkpoint's scales" if codes.static else "a scale for each token and head"
    return f"{codes.dtype} with {scales}"


def _memory_map(report: Report, memory: MemoryPlanner) -> None:
    weights, step = memory.check_weights_fit(), memory.cpu_step_bytes()
    size = memory.size_kv(memory.kv_budget(weights + step))
    report.section("Memory map (before loading)", "memory_map")
    report.size("weights", weights - memory.draft_bytes)
    if memory.draft_bytes:
        report.size("draft weights", memory.draft_bytes)
    report.size("slot columns", memory.column_bytes(size.max_model_len))
    if size.state_bytes:
        each = f"{_size(size.state_bytes)} each"
        report.size("states", memory.fixed_state_bytes(), f": {memory.limits.max_num_seqs} requests, {each}")
        report.size(
            "snapshots", size.num_snapshots * size.state_bytes, f": {size.num_snapshots} states for prefixes"
        )
    report.size("largest step", step, " (estimated; a GPU measures it)")
    blocks = f"{size.num_blocks} blocks of {size.block_size} tokens, {_size(size.block_bytes)} each"
    report.size("kv cache", size.num_blocks * size.block_bytes, f": {blocks}")
    if len(size.groups) > 1:
        kinds = Counter((len(group.layers), group.window) for group in size.groups)
        text = ", ".join(_group(count, *kind) for kind, count in kinds.items())
        groups = [{"layers": len(group.layers), "window": group.window} for group in size.groups]
        report.row("layer groups", f"{text}; a block serves one group", groups)
    requests = size.num_blocks // sum(
        group.most_blocks(size.max_model_len, 1, size.block_size) for group in size.groups
    )
    text = f"{size.max_model_len} tokens; room for {requests} requests of full length at once"
    report.row("context", text, {"tokens": size.max_model_len, "full_requests": requests})


def _group(count: int, layers: int, window: int | None) -> str:
    lifetime = "all tokens" if window is None else f"the last {window} tokens"
    return f"{count} x {layers} layers that keep {lifetime}"


def _load(report: Report, config: EngineConfig, imports_s: float) -> None:
    from quire.host import build_engine

    engine, info = build_engine(config, imports_s)
    engine.close()
    report.section("Start-up", "start_up")
    for phase, seconds in info.phases_s.items():
        report.row(phase, f"{seconds:.2f} s", {"seconds": round(seconds, 3)})
    for number, line in enumerate(info.start_up_of_ranks()):
        report.row(f"rank {number}", f"begin+duration: {line}", {"spans_s": info.rank_phases_s[number]})
    total = sum(info.phases_s.values())
    report.row("total", f"{total:.2f} s", {"seconds": round(total, 3)})


def _why(setting: str, reason: str) -> str:
    return reason if setting == "auto" else "as set"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
