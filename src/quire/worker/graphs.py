"""How a step is launched: batch, model, logits and, where the host has no part in it, sampling; operation
by operation or as one replay of a CUDA graph.

A captured step reads nothing from the host but the header that `KernelBatcher` sends, so it can be
replayed for every plan of its shape: so many rows, so many tokens, both rounded up to a few sizes. Missing
rows are dummies. A new shape runs eagerly, which compiles and loads its kernels, and is recorded while the
device is at it; shapes that are to be expected are recorded when the engine has nothing to do. All graphs share
one pool of memory, because they run one after the other. What a graph itself takes is not given back, so beyond
a number of shapes the others run eagerly each time.
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
from quire.worker.out_of_memory import is_out_of_memory
from quire.worker.staging import Staging

log = logging.getLogger("quire")


@dataclass(slots=True)
class LaunchedStep:
    """A step under way on the device."""

    step: DeviceStep
    logits: torch.Tensor | None  # [rows, vocab]; None: its tokens are sampled, and booked in the columns
    hidden: torch.Tensor | None = None  # [tokens, hidden], where prompts are scored or pooled


class Launcher(Protocol):
    def launch(self, plan: StepPlan, staging: Staging) -> LaunchedStep: ...

    def warm_up(self, staging: Staging) -> bool:
        """Make a later step cheaper, while there is nothing else to do; False: all is done."""
        ...

    def drop_graphs(self) -> None:
        """Give back the memory of captured steps."""
        ...


class Threads:
    """How many CPU threads a step is worth.

    The layers of a small step take microseconds: waking more threads for each of them gains little, and
    loses much when another process has their core. So steps below `_SMALL` multiply-adds run on one.
    """

    _SMALL = 64_000_000

    def __init__(self, num_parameters: int, asked: int | None) -> None:
        self._num_parameters = num_parameters
        self._most = asked or _ALL_THREADS
        self._least = asked or 1

    def use_for(self, tokens: int) -> None:
        torch.set_num_threads(self._most if tokens * self._num_parameters >= self._SMALL else self._least)


_ALL_THREADS = torch.get_num_threads()  # before any step has changed it


class Eager:
    """One launch per operation. `threads` is for the CPU."""

    def __init__(self, model: Model, batcher: Batcher, threads: Threads | None = None) -> None:
        self._model, self._batcher, self._threads = model, batcher, threads

    def launch(self, plan: StepPlan, staging: Staging) -> LaunchedStep:
        if self._threads:
            self._threads.use_for(plan.total_tokens)
        step, batch = self._batcher.build(plan, staging)
        hidden = self._model(batch)
        last = hidden.index_select(0, batch.logit_index) if plan.keeps_hidden else hidden
        return LaunchedStep(step, self._model.logits(last), hidden)

    def warm_up(self, staging: Staging) -> bool:
        return False

    def drop_graphs(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for. As many tokens as rows: one token each."""

    rows: int
    tokens: int
    sampling: Literal["plain", "filtered", "later"]  # later: not in the graph; the host has a part in it
    shares: bool = False  # rows share blocks that attention reads once

    @property
    def one_each(self) -> bool:
        return self.rows == self.tokens


MOST_GRAPHS = 512  # of one runner


class CudaGraphs:
    """Replays steps of up to `max_tokens` tokens, and of exactly `full`, which is what a step has while prompts wait.
    `eager` runs other long ones, which would be padded, and those whose prompts are scored or pooled.

    `reserve` is about the memory of the largest of them, in bytes; at most `most_graphs` are kept.
    """

    def __init__(
        self,
        eager: Eager,
        model: Model,
        batcher: KernelBatcher,
        sampler: Sampler,
        max_rows: int,
        max_tokens: int,
        full: int,
        reserve: int,
        most_graphs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._eager, self._model, self._batcher, self._sampler = eager, model, batcher, sampler
        self._row_sizes, self._token_sizes = row_sizes(max_rows), token_sizes(max_tokens)
        self._full, self._most_graphs, self._reserve = full, most_graphs, reserve
        self._captured: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._idle_sizes = self._row_sizes[::-1]  # decode steps not recorded yet, the smallest last
        # One buffer of logits for all sizes: kept per size, they would add up to gigabytes.
        self._logits = torch.empty(max_rows, model.spec.vocab_size, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device)  # to record on: nothing runs there
        self._captures = True  # False: memory was short, so steps run eagerly until the engine is idle
        self._dropped = False  # likewise; True: what was dropped can be tried again
        self._first: torch.cuda.CUDAGraph | None = self._begin_pool()

    def _begin_pool(self) -> torch.cuda.CUDAGraph:
        """Record a first block of the pool as large as any step needs, for all graphs to be cut from: if each took
        what it needs, the growing sizes of steps could not use each other's memory."""
        self._pool = torch.cuda.graph_pool_handle()
        size, device = max(self._reserve, 1 << 20), self._logits.device
        return self._record(lambda: torch.empty(size, dtype=torch.uint8, device=device)[:1].zero_())

    def drop_graphs(self) -> None:
        self._captures, self._dropped = False, True
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
        return LaunchedStep(
            self._batcher.step(plan), self._logits[: len(plan.slots)] if shape.sampling == "later" else None
        )

    def warm_up(self, staging: Staging) -> bool:
        if self._dropped:
            self._dropped = False
            self._first, self._captures = self._begin_pool(), True
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
        if tokens > self._token_sizes[-1] and tokens != self._full:
            return None
        # Few sizes of rows: a surplus row costs little beside the tokens of the others.
        rows = min(max(8, 1 << (rows - 1).bit_length()), self._row_sizes[-1])
        if tokens != self._full:
            tokens = _round_up(self._token_sizes, max(tokens, rows + 1))
        return StepShape(rows, tokens, sampling) if tokens > rows else None

    def _sampling(self, plan: StepPlan) -> Literal["plain", "filtered", "later"]:
        if self._sampler.needs_host_work(plan.slots):
            return "later"
        return "filtered" if self._sampler.has_filters(plan.slots) else "plain"

    def _run(self, shape: StepShape) -> None:
        """The step for whatever header is there."""
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
        if not self._captures or len(self._captured) >= self._most_graphs:
            return
        try:
            self._captured[shape] = self._record(lambda: self._run(shape))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The step itself has run. Later ones of new shapes run eagerly too.
            self._most_graphs = len(self._captured)
            log.warning("no memory for more than %d captured steps", self._most_graphs)

    def _record(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Not with torch.cuda.graph, which waits for the device and collects garbage first."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
        return graph


def _round_up(sizes: list[int], wanted: int) -> int:
    """The least of the ascending `sizes` that is enough, or the largest."""
    return sizes[min(bisect.bisect_left(sizes, wanted), len(sizes) - 1)]


def row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that are captured: fine steps where few rows make a step cheap."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 4097, 32)}
    return [*sorted(size for size in sizes if size < max_rows), max_rows]


def token_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens that are captured for steps with prompts: at most a ninth is padding from 128 on."""
    sizes = {
        *range(16, 65, 16),
        80,
        96,
        112,
        *(base * part // 8 for base in (128, 256, 512, 1024) for part in range(8, 17)),
    }
    return [*sorted(size for size in sizes if size < max_tokens), max_tokens]
