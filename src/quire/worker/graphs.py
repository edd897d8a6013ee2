"""Launching a step: operation by operation, or as one replay of a CUDA graph.

A step is the batch, the model, the logits and, unless the host takes part in it, sampling. A captured step reads nothing
from the host but the header that `KernelBatcher` sends, so one graph serves every plan of its shape: the numbers of rows
and tokens, rounded up to a few sizes. Missing rows are filled with the dummy slot.

A new shape first runs eagerly, which compiles and loads its kernels, and is captured while the device still runs it.
Common shapes are captured while the engine is idle. All graphs share one memory pool, because they run one after the
other. The memory of a graph itself is never returned, so there is a limit on the number of graphs; further shapes run
eagerly every time.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from quire.models.decoder import Model
from quire.sampling.sampler import Sampler
from quire.types import StepPlan
from quire.worker.batch import Batcher, DeviceStep, KernelBatcher, plan_header
from quire.worker.memory.out_of_memory import is_out_of_memory
from quire.worker.staging import Staging

log = logging.getLogger("quire")


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight on the device."""

    step: DeviceStep
    logits: torch.Tensor | None  # [rows, vocab]; None: the graph also samples and updates the slot columns
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


# Sampling of a captured step. later: outside of the graph, because the host takes part in it.
SamplingMode = Literal["plain", "filtered", "later"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a captured step. With as many tokens as rows, each row has one token."""

    rows: int
    tokens: int
    sampling: SamplingMode
    shares: bool = False  # rows share blocks that attention reads once

    @property
    def one_each(self) -> bool:
        return self.rows == self.tokens


MAX_GRAPHS = 512  # of one runner


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """Bounds on the steps that are captured."""

    max_rows: int
    max_tokens: int  # of a step with prompts that is padded
    full_tokens: int  # the token budget of a step, which is captured without padding; 0: it is not captured
    shared_bytes: int  # about the memory of the largest captured step
    max_graphs: int


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
        self._logits = torch.empty(limits.max_rows, model.spec.vocab_size, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device)  # to capture on: nothing runs there
        self._first: torch.cuda.CUDAGraph | None = self._begin_pool()

    def _set_limits(self, limits: GraphLimits) -> None:
        self._row_sizes, self._token_sizes = row_sizes(limits.max_rows), token_sizes(limits.max_tokens)
        self._limits, self._max_graphs = limits, limits.max_graphs
        self._captured: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._idle_sizes = self._row_sizes[::-1]  # decode steps not captured yet, the smallest last
        self._may_capture = True  # False: memory was short, so steps run eagerly until the engine is idle
        self._dropped = False  # graphs were dropped for lack of memory; retry when the engine is idle

    def _begin_pool(self) -> torch.cuda.CUDAGraph:
        """Capture a first allocation that is as large as any step needs; all graphs are cut from it.

        If each graph allocated what it needs, steps of growing size could not reuse each other's memory.
        """
        self._pool = torch.cuda.graph_pool_handle()
        size, device = max(self._limits.shared_bytes, 1 << 20), self._logits.device
        return self._capture(lambda: torch.empty(size, dtype=torch.uint8, device=device)[:1].zero_())

    def drop_graphs(self) -> None:
        self._may_capture, self._dropped = False, True
        self._captured.clear()
        self._first = None

    def launch(self, plan: StepPlan, staging: Staging) -> LaunchedStep:
        shape = self._shape_for(plan)
        if shape is None:
            return self._eager.launch(plan, staging)
        self._batcher.load(plan_header(plan), staging, shape.rows, shape.one_each)
        if graph := self._captured.get(shape):
            graph.replay()
        else:
            self._run_new(shape)
        logits = self._logits[: len(plan.slots)] if shape.sampling == "later" else None
        return LaunchedStep(self._batcher.step(plan), logits)

    def warm_up(self, staging: Staging) -> bool:
        if self._dropped:
            self._dropped = False
            self._first, self._may_capture = self._begin_pool(), True
        while self._idle_sizes:
            size = self._idle_sizes.pop()
            shape = StepShape(size, size, "plain")
            if shape not in self._captured:
                staging.begin()
                self._batcher.load(plan_header(None), staging, size, True)
                self._run_new(shape)
                return True
        return False

    def _shape_for(self, plan: StepPlan) -> StepShape | None:
        rows, tokens = len(plan.slots), plan.total_tokens
        if plan.keeps_hidden:
            return None
        sampling = self._sampling(plan)
        if rows == tokens:
            size = _round_up(self._row_sizes, rows)
            return StepShape(size, size, sampling, plan.shared is not None)
        is_full = tokens == self._limits.full_tokens
        if tokens > self._token_sizes[-1] and not is_full:
            return None
        # Few row sizes are enough: a padding row costs little beside the tokens of the others.
        rows = min(max(8, 1 << (rows - 1).bit_length()), self._row_sizes[-1])
        if not is_full:
            tokens = _round_up(self._token_sizes, max(tokens, rows + 1))
        return StepShape(rows, tokens, sampling) if tokens > rows else None

    def _sampling(self, plan: StepPlan) -> SamplingMode:
        if self._sampler.needs_host_work(plan.slots):
            return "later"
        return "filtered" if self._sampler.has_filters(plan.slots) else "plain"

    def _run(self, shape: StepShape) -> None:
        """Run a step of `shape` with the current header."""
        batch = self._batcher.bounded(shape.rows, shape.tokens, shape.shares)
        logits = self._model.logits(self._model(batch))
        if shape.sampling == "later":
            self._logits[: shape.rows].copy_(logits)
            return
        tokens = torch.empty(shape.rows, dtype=torch.int32, device=logits.device)
        self._sampler.choose(logits, self._batcher.slots(shape.rows), tokens, shape.sampling == "filtered")
        self._batcher.advance_rows(shape.rows, tokens)

    def _run_new(self, shape: StepShape) -> None:
        self._run(shape)
        if not self._may_capture or len(self._captured) >= self._max_graphs:
            return
        try:
            self._captured[shape] = self._capture(lambda: self._run(shape))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The step itself has run. Later steps of new shapes run eagerly too.
            self._max_graphs = len(self._captured)
            log.warning(
                "no memory for more than %d captured steps; steps of other shapes run eagerly",
                self._max_graphs,
            )

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
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


def _round_up(sizes: list[int], wanted: int) -> int:
    """Return the least of the ascending `sizes` that is at least `wanted`, or the largest size."""
    return sizes[min(bisect.bisect_left(sizes, wanted), len(sizes) - 1)]


def row_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows to capture, ascending: close together where few rows make a step cheap."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 4097, 32)}
    return [*sorted(size for size in sizes if size < max_rows), max_rows]


def token_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture for steps with prompts, ascending.

    From 128 tokens on, at most a ninth of a step is padding.
    """
    sizes = {
        *range(16, 65, 16),
        80,
        96,
        112,
        *(base * part // 8 for base in (128, 256, 512, 1024) for part in range(8, 17)),
    }
    return [*sorted(size for size in sizes if size < max_tokens), max_tokens]
