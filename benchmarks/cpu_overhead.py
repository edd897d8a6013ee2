"""Overhead of a decode step on a CPU: everything but the model, from scheduling and batch to sampling and results.

    python benchmarks/cpu_overhead.py [--batch 1 8]

Engine and worker are the real ones, but the model returns at once, with bfloat16 logits of 151,936 tokens. Prints
milliseconds per step with one thread, the best and the median, for greedy and sampled rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES

from quire.assembly.memory import memory_planner
from quire.assembly.steps import pick_launch
from quire.attention.reference import ReferenceAttention
from quire.config import EngineConfig
from quire.core.block_pool import LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy
from quire.core.prefix_cache import HashPrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.steplog import StepLog
from quire.layers.attention import Attention
from quire.layers.env import Env
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from quire.types import EngineRequest, SamplingParams
from quire.worker.executor import LocalExecutor, device_guard
from quire.worker.memory.sizing import KVSize
from quire.worker.worker import Worker

LENGTH, BLOCK = 2048, 16
WANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_k 50, top_p 0.95": {"temperature": 0.6, "top_k": 50, "top_p": 0.95},
}


class InstantModel:
    """A model that returns tensors of the right shapes without computing them."""

    def __init__(self, spec: ModelSpec, rows: int, backend: ReferenceAttention) -> None:
        env = Env(None, Parallel(), backend, torch.device("cpu"), torch.bfloat16)  # type: ignore[arg-type]
        self.spec = spec
        self.attention_layers = [Attention(env, 0, spec.num_heads, spec.kv_layout(0, "bfloat16"), 1.0)]
        self._hidden = torch.zeros(LENGTH, 1)
        self._logits = torch.randn(rows, spec.vocab_size).bfloat16()

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._hidden[: len(batch.input_ids)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


def make_engine(rows: int) -> Engine:
    backend, cpu = ReferenceAttention(), torch.device("cpu")
    spec = ModelSpec.from_config(SHAPES["Qwen3-0.6B"])
    config = EngineConfig(model="", max_model_len=LENGTH, max_num_seqs=rows, cpu_threads=1).resolved(
        0, LENGTH
    )
    model = InstantModel(spec, rows, backend)
    memory = memory_planner(config, Path(config.model), spec, torch.bfloat16, cpu, explicit_len=True)
    worker = Worker(model, backend, memory, pick_launch(config, memory, backend, depth=2))
    blocks = rows * LENGTH // BLOCK
    runner = worker.allocate(KVSize(blocks, BLOCK, 0, LENGTH))
    pool, log = BlockPool(blocks, LRU()), StepLog()
    limits = SchedulerLimits(rows, LENGTH, LENGTH, BLOCK)
    scheduler = Scheduler(Blocks(pool, HashPrefixCache(pool, BLOCK), BLOCK), Policy(), limits, log)
    return Engine(scheduler, LocalExecutor(runner, device_guard(cpu)), NoGrammar(), 2, log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    for rows in args.batch:
        for name, wants in WANTS.items():
            engine, times = make_engine(rows), []
            for i in range(rows):
                params = SamplingParams(max_tokens=args.steps, ignore_eos=True, **wants)
                engine.add(EngineRequest(str(i), list(range(128 * i, 128 * i + 128)), params, seed=i))
            while engine.has_work:
                begin = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - begin)
            best, median = min(times[3:-3]) * 1e3, statistics.median(times) * 1e3
            print(f"batch {rows:<4}{name:<24}best {best:.2f} ms, median {median:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
