"""When a step is captured, replayed or run eagerly. Only a GPU can check the contents of a graph (`-m gpu`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from quire.types import StepPlan
from quire.worker import graphs
from quire.worker.graphs import CudaGraphs, GraphLimits, row_sizes, token_sizes


class Graphs(CudaGraphs):
    """Launcher without a device: it lists what it runs, captures and replays."""

    def __init__(self, max_rows: int, max_tokens: int, full_tokens: int, max_graphs: int = 99) -> None:
        self.done: list[tuple[str, Any]] = []
        self.has_memory = True
        limits = GraphLimits(
            max_rows=max_rows,
            max_tokens=max_tokens,
            full_tokens=full_tokens,
            shared_bytes=0,
            max_graphs=max_graphs,
        )
        self._set_limits(limits)
        self._logits = torch.zeros(max_rows, 1)
        self._sampler = SimpleNamespace(needs_host_work=lambda slots: False, has_filters=lambda slots: False)
        self._batcher = SimpleNamespace(load=lambda *args: None, step=lambda plan: None)
        self._eager = SimpleNamespace(launch=lambda plan, staging: self.done.append(("eager", None)))

    def _run(self, shape: graphs.StepShape) -> None:
        self.done.append(("run", (shape.rows, shape.tokens)))

    def _begin_pool(self) -> Any:
        self.done.append(("pool", None))

    def _capture(self, run: Any) -> Any:
        run()
        if not self.has_memory:
            self.done.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        ((_, shape),) = self.done[-1:]
        self.done[-1] = "capture", shape
        return SimpleNamespace(replay=lambda: self.done.append(("replay", shape)))

    def step(self, *tokens: int) -> list[tuple[str, Any]]:
        """Launch a step whose rows have `tokens` new tokens; return what the launcher did."""
        self.done.clear()
        counts = np.array(tokens, np.int32)
        none = np.zeros_like(counts)
        plan = StepPlan(
            0, none, counts, none, none, np.ones(len(tokens), bool), [], [], int(counts.sum()), 64
        )
        self.launch(plan, SimpleNamespace())
        return list(self.done)


def test_a_shape_is_captured_when_it_first_occurs() -> None:
    steps = Graphs(64, 2048, 8192)
    assert steps.step(1, 1, 1) == [("run", (4, 4)), ("capture", (4, 4))]
    assert steps.step(1, 1, 1, 1) == [("replay", (4, 4))]
    assert steps.step(100, 1) == [("run", (8, 112)), ("capture", (8, 112))]
    assert steps.step(1, 104) == [("replay", (8, 112))]
    assert steps.step(8000, 192) == [("run", (8, 8192)), ("capture", (8, 8192))]
    assert steps.step(8000, 191) == [("eager", None)]  # would be padded, or is too long


def test_shapes_beyond_the_most_run_eagerly() -> None:
    steps = Graphs(64, 2048, 8192, max_graphs=2)
    for rows in (1, 2):
        steps.step(*[1] * rows)
    for _ in range(2):
        assert steps.step(1, 1, 1, 1) == [("run", (4, 4))]
    assert steps.step(1, 1) == [("replay", (2, 2))]


def test_an_idle_engine_captures_all_sizes_of_rows_once() -> None:
    steps, staging = Graphs(16, 64, 64), SimpleNamespace(begin=lambda: None)
    steps.step(1, 1)
    captured = 0
    while steps.warm_up(staging):
        captured += 1
    assert captured == len(row_sizes(16)) - 1
    assert steps.step(*[1] * 16) == [("replay", (16, 16))]


def test_a_shape_for_which_memory_is_short_runs_without_a_graph() -> None:
    steps = Graphs(64, 2048, 8192)
    steps.step(1, 1)
    steps.has_memory = False
    assert steps.step(1) == [("run", (1, 1))], "the step has run, so it must not fail"
    steps.has_memory = True
    assert steps.step(1) == [("run", (1, 1))], "a capture would fail in every step"
    assert steps.step(1, 1) == [("replay", (2, 2))]


def test_graphs_that_were_dropped_are_captured_again_once_the_engine_is_idle() -> None:
    steps, staging = Graphs(2, 64, 64), SimpleNamespace(begin=lambda: None)
    steps.step(1, 1)
    steps.drop_graphs()
    assert steps.step(1, 1) == [("run", (2, 2))]
    steps.done.clear()
    assert steps.warm_up(staging)
    assert steps.done[0] == ("pool", None)
    steps.step(1, 1)
    assert steps.step(1, 1) == [("replay", (2, 2))]


def test_short_steps_with_prompts_are_padded_by_few_tokens() -> None:
    sizes = token_sizes(2048)
    assert sizes[:8] == [16, 32, 48, 64, 80, 96, 112, 128]
    for tokens in range(1, 2049):
        padding = min(size for size in sizes if size >= tokens) - tokens
        assert padding < 16 if tokens <= 128 else padding * 9 <= tokens + padding
