# ruff: noqa: E402  (imports that must follow a patch)
"""Print the kernels of steps that a start does not compile although it finds none on disk.

    python tests/kernels/step_kernels.py [MODEL ...]

Models have the shapes of real ones and few layers, for Hopper, without a GPU: tensors are on the meta device, and
launches are noted instead of run. A line of output is a step (rows, tokens of each, tokens before them) and the names of
its kernels that no step before it has launched. test_step_kernels.py runs this in a separate process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from targets import TARGETS, TargetDriver
from triton import knobs
from triton.runtime import driver, jit

from quire import kernels

META = torch.device("meta")
kernels.available = lambda device: True  # before other modules import it

from quire import EngineConfig
from quire.assembly.memory import memory_planner
from quire.assembly.model import served_spec
from quire.assembly.steps import pick_launch
from quire.attention.triton import TritonAttention
from quire.kernels import ahead, fused
from quire.kernels import target as targets
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import DummyCheckpoint
from quire.models.config.load import load_spec
from quire.models.registry import build_model
from quire.parallel.ranks import Parallel
from quire.quant import products
from quire.quant.packed_codes import packed_codes_product
from quire.worker import results
from quire.worker.launch import graphs, launch_factory
from quire.worker.worker import Worker, run_step

_SIZES = {
    "num_hidden_layers": 2,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu"}
_EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, **_SIZES, **_HEADS,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], **_SIZES, **_HEADS, "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, **_SIZES, **_HEADS,
        **_EXPERTS,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"], **_SIZES, **_HEADS, **_EXPERTS, "hidden_size": 2048,
        "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
        "partial_rotary_factor": 0.25, "shared_expert_intermediate_size": 768,
    },
}  # fmt: skip
QUANTIZATION = {"qwen3-next": "fp8", "llama": "int4"}  # of some models
LENGTHS = (1, 5, 16, 17, 64, 100, 128, 500, 1024, 2000, 2048, 2049, 2064, 3000, 4096, 4097, 6000, 8191, 8192)
ROWS = (2, 3, 5, 9, 16, 17, 64, 128, 256)


class MetaCheckpoint(DummyCheckpoint):
    """Weights without numbers."""

    def __init__(self) -> None:
        pass

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), cols: slice = slice(None)
    ) -> torch.Tensor:
        sizes = [len(range(*part.indices(size))) for part, size in zip((rows, cols), shape)]
        return torch.empty(*sizes, *shape[2:], dtype=torch.bfloat16, device=META)


def without_gpu() -> set[tuple[str, str]]:
    """Replace what needs a GPU. Return the set that will hold the name and the key of each kernel that is launched."""
    launched: set[tuple[str, str]] = set()
    launch = jit.JITFunction.run

    def note(**about: Any) -> bool:
        launched.add((about["fn"].jit_function.__name__, about["key"]))
        return True  # tells Triton not to compile

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    def graph_of(self: Any, captured: Callable[[], object]) -> Any:
        captured()
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def nothing_on_disk(*args: object) -> Iterator[Any]:
        yield SimpleNamespace(any_missing=lambda: True)

    replacements: list[tuple[Any, str, Any]] = [
        (jit.JITFunction, "run", run),
        (knobs.runtime, "jit_cache_hook", note),
        (torch.cuda, "Stream", lambda device: None),
        (torch.cuda, "graph_pool_handle", lambda: None),
        (graphs.CudaGraphs, "_graph_of", graph_of),
        (launch_factory, "gpu_memory", lambda device: 140 << 30),
        (results.HostHandle, "wait", lambda handle: None),
        (products, "FAST", [packed_codes_product]),
        (ahead, "background_compilation", nothing_on_disk),
    ]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    driver.set_active(TargetDriver(90))
    targets.KNOWN_TARGETS[META] = TARGETS[90]
    return launched


def worker_of(name: str) -> Worker:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps({**MODELS[name], "dtype": "bfloat16"}))
        config = EngineConfig(
            model=folder, load_format="dummy", quantization=QUANTIZATION.get(name, "auto"), max_num_seqs=256
        )
        spec = served_spec(config, load_spec(path))
        config = config.resolved(140 << 30, spec.max_model_len)
        backend = TritonAttention()
        memory = memory_planner(config, path, spec, torch.bfloat16, META, explicit_len=True)
    env = Env(MetaCheckpoint(), Parallel(), backend, META, torch.bfloat16, fused, spec.quantization)
    with torch.inference_mode():
        model = build_model(spec, env)
    return Worker(model, backend, memory, pick_launch(config, memory, backend, depth=2))


def steps(budget: int) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of steps, the tokens of each row, and the tokens in front of them."""
    for before in (0, 100, 5000, 100_000):
        yield from ((1, tokens, before) for tokens in LENGTHS)
    for before in (0, 5000):
        for rows in ROWS:
            yield from ((rows, tokens, before) for tokens in (1, 2, *LENGTHS) if rows * tokens <= budget)


def check(name: str, launched: set[tuple[str, str]]) -> None:
    worker = worker_of(name)
    worker.compile_kernels(None)  # type: ignore[arg-type]  (no process is needed)
    known = set(launched)
    rows, per_row = worker.largest_step()
    size = worker.scratch_size()
    runner = worker.make_runner(size, worker.make_blocks(size), graphs=True)
    runner.launcher.drop_graphs()  # so that every shape of step is run
    for step in (*steps(rows * per_row), (rows, per_row, 0)):
        launched.clear()
        run_step(runner, *step)
        if names := sorted(kernel for kernel, _ in launched - known):
            print(name, *step, *names)
        known |= launched
    print(name, "kernels:", len(known))


def main() -> None:
    launched = without_gpu()
    for name in sys.argv[1:] or MODELS:
        launched.clear()
        check(name, launched)


if __name__ == "__main__":
    main()
