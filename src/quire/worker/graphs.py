"""Launching a step: operation by operation, or as one replay of a CUDA graph.

A step is the batch, the model, the logits and, unless the host takes part in it, sampling. A captured step reads nothing
from the host but the header that `KernelBatcher` sends, so one graph serves every plan of its shape: the numbers of rows
and tokens, rounded up to a few sizes. Missing rows are filled with the dummy slot.

Common shapes are captured before the first request and while the engine is idle. A step of a new shape is padded to a
captured one that stands in for it (step_shapes.py). Without one, it runs eagerly, which compiles and loads its kernels,
and is captured while the device still runs it. All graphs share one memory pool, because they run one after the other.
The memory of a graph itself is never returned, so the number of graphs is limited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.models.decoder import Model
from quire.sampling.sampler import Sampler
from quire.types import StepPlan
from quire.worker.batch import Batcher, DeviceStep, KernelBatcher, plan_header
from quire.worker.memory.out_of_memory import is_out_of_memory
from quire.worker.staging import Staging
from quire.worker.step_shapes import GraphLimits, SamplingMode, StandIns, StepShape, StepShapes

log = logging.getLogger("quire")


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight on the device."""

    step: DeviceStep
    logits: (
        torch.Tensor | None
    )  # [logit rows, vocab]; None: the graph also samples and updates the slot columns
    hidden: torch.Tensor | None = None  # [tokens, hidden] if prompts are scored or pooled


class Launcher(Protocol):
    """Way to put a step on the device."""

    def launch(self, plan: StepPlan, staging: Staging) -> LaunchedStep:
        """Queue the step of `plan` on the current stream, without waiting for the device."""
        ...

    def warm_up(self, staging: Staging) -> bool:
        """Make one later step cheaper while the engine is idle. Return False if nothing is left to do."""
        ...

    def drop_graphs(self) -> None:
        """Release the memory of captured steps."""
        ...

    def capture_common(self) -> None:
        """Capture the steps that most requests need. They do not run, so the weights may still be undefined."""
        ...

    def run_common(self) -> None:
        """Run the steps of `capture_common` once each, with any content, so that their kernels are compiled."""
        ...


class Threads:
    """Choice of the number of CPU threads for a step.

    The layers of a small step take microseconds. Waking more threads for each of them gains little, and costs much when
    another process uses their core. So steps of fewer than `_SMALL` multiply-adds run on one thread.
    """

    _SMALL = 64_000_000

    def __init__(self, num_parameters: int, count: int | None) -> None:
        """Use `count` threads for every step; None: all cores for large steps, one thread for small ones."""
        self._num_parameters = num_parameters
        self._for_large = count or _ALL_THREADS
        self._for_small = count or 1

    def use_for(self, tokens: int) -> None:
        """Set the number of torch's threads for a step of `tokens` tokens."""
        is_large = tokens * self._num_parameters >= self._SMALL
        torch.set_num_threads(self._for_large if is_large else self._for_small)


_ALL_THREADS = torch.get_num_threads()  # before any step has changed it


class Eager:
    """Launcher that runs a step operation by operation. `threads` is for the CPU."""

    def __init__(self, model: Model, batcher: Batcher, threads: Threads | None = None) -> None:
        self._model, self._batcher, self._threads = model, batcher, threads

    def launch(self, plan: StepPlan, staging: Staging) -> LaunchedStep:
        if self._threads:
            self._threads.use_for(plan.total_tokens)
        step, batch = self._batcher.build(plan, staging)
        hidden = self._model(batch)
        rows = hidden.index_select(0, batch.logit_index) if plan.keeps_hidden else hidden
        return LaunchedStep(step, self._model.logits(rows), hidden)

    def warm_up(self, staging: Staging) -> bool:
        return False

    def drop_graphs(self) -> None:
        pass

    def capture_common(self) -> None:
        pass

    def run_common(self) -> None:
        pass


MAX_GRAPHS = 512  # of one runner


class CudaGraphs:
    """Launcher that replays captured steps.

    It captures steps of up to `limits.max_tokens` tokens, and steps of exactly `limits.full_tokens`, as happen while
    prompts queue up. `eager` runs other long steps, which would need padding, and steps whose prompts are scored or
    pooled.
    """

    def __init__(
        self,
        eager: Eager,
        model: Model,
        batcher: KernelBatcher,
        sampler: Sampler,
        limits: GraphLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._eager, self._model, self._batcher, self._sampler = eager, model, batcher, sampler
        self._set_limits(limits)
        # One buffer of logits for all sizes: one for each size would add up to gigabytes.
        self._logits = torch.empty(
            self._most_logits(limits), model.spec.vocab_size, dtype=dtype, device=device
        )
        self._stream = torch.cuda.Stream(device)  # to capture on: nothing runs there
        self._first: torch.cuda.CUDAGraph | None = self._begin_pool()

    def _most_logits(self, limits: GraphLimits) -> int:
        """Return the most rows of logits of a step."""
        return limits.max_logit_rows or limits.max_rows

    def _set_limits(self, limits: GraphLimits) -> None:
        self.shapes = StepShapes(limits)
        self._limits, self._max_graphs = limits, limits.max_graphs
        self._captured: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._stand_ins = StandIns()
        self._for_idle = self.shapes.when_idle()[::-1]  # the most useful last
        self._may_capture = True  # False: memory was short, so steps run eagerly until the engine is idle
        self._dropped = False  # graphs were dropped for lack of memory; retry when the engine is idle

    def _begin_pool(self) -> torch.cuda.CUDAGraph:
        """Capture a first allocation that is as large as any step needs; all graphs are cut from it.

        If each graph allocated what it needs, steps of growing size could not reuse each other's memory.
        """
        self._pool = torch.cuda.graph_pool_handle()
        size, device = max(self._limits.shared_bytes, 1 << 20), self._logits.device
        return self._graph_of(lambda: torch.empty(size, dtype=torch.uint8, device=device)[:1].zero_())

    def drop_graphs(self) -> None:
        self._may_capture, self._dropped = False, True
        self._captured.clear()
        self._stand_ins.forget()
        self._first = None

    def launch(self, plan: StepPlan, staging: Staging) -> LaunchedStep:
        wanted = self._shape_of(plan)
        if wanted is None:
            return self._eager.launch(plan, staging)
        shape = wanted
        if wanted not in self._captured:
            shape = self._stand_ins.choose(wanted, self._captured, self._has_room)
        self._batcher.load(plan_header(plan), staging, shape.rows, shape.one_each)
        if graph := self._captured.get(shape):
            graph.replay()
            if shape.sampling != wanted.sampling:
                self._choose_tokens(shape, self._logits[: shape.logit_rows], wanted.sampling)
        else:
            self._run(shape)
            self._capture(shape)
        step = self._batcher.step(plan)
        logits = self._logits[: len(step.logit_rows.slots)] if wanted.sampling == "later" else None
        return LaunchedStep(step, logits)

    @property
    def _has_room(self) -> bool:
        return self._may_capture and len(self._captured) < self._max_graphs

    def capture_common(self) -> None:
        for shape in self.shapes.at_start():
            self._capture(shape)

    def run_common(self) -> None:
        for shape in self.shapes.at_start():
            self._run(shape)

    def warm_up(self, staging: Staging) -> bool:
        if self._dropped:
            self._dropped = False
            self._first, self._may_capture = self._begin_pool(), True
            self._for_idle = self.shapes.when_idle()[::-1]
        while self._for_idle:
            shape = self._for_idle.pop()
            if shape not in self._captured:
                self._capture(shape)
                return True
        return False

    def _shape_of(self, plan: StepPlan) -> StepShape | None:
        if plan.keeps_hidden:
            return None
        shares = plan.shared is not None
        drafts = plan.max_drafts
        longest = 1 + drafts + plan.has_prompts
        rows, tokens = len(plan.slots), plan.total_tokens
        return self.shapes.fit(rows, tokens, self._sampling(plan), shares, drafts, longest)

    def _sampling(self, plan: StepPlan) -> SamplingMode:
        if self._sampler.needs_host_work(plan.slots):
            return "later"
        return "filtered" if self._sampler.has_filters(plan.slots) else "plain"

    def _run(self, shape: StepShape) -> None:
        """Run a step of `shape` with the current header."""
        batch = self._batcher.bounded(shape.rows, shape.tokens, shape.shares, shape.drafts)
        logits = self._model.logits(self._model(batch))
        if shape.sampling == "later":
            self._logits[: shape.logit_rows].copy_(logits)
        else:
            self._choose_tokens(shape, logits, shape.sampling)

    def _choose_tokens(self, shape: StepShape, logits: torch.Tensor, sampling: SamplingMode) -> None:
        """Sample a token for each row of `logits` [logit rows, vocab], and update the slot columns."""
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        slots, lengths = self._batcher.logits_at(len(logits))
        self._sampler.choose(logits, slots, tokens, sampling == "filtered", lengths)
        self._batcher.advance_rows(shape.rows, tokens, shape.drafts)

    def _capture(self, shape: StepShape) -> None:
        """Capture a step of `shape`, if there is room for another graph."""
        if not self._has_room:
            return
        try:
            self._captured[shape] = self._graph_of(lambda: self._run(shape))
            self._stand_ins.forget()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._max_graphs = len(self._captured)
            log.warning(
                "no memory for more than %d captured steps; others are padded or run eagerly",
                self._max_graphs,
            )

    def _graph_of(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a graph of the work that `run` launches."""
        graph = torch.cuda.CUDAGraph()
        # Without torch.cuda.graph, which waits for the device and collects garbage first.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
        return graph
