"""CUDA graphs: the first stages of a step as one replay.

A captured step reads nothing from the host but the header that `KernelBatcher` sends, so one graph serves every plan of
its shape: the numbers of rows and tokens, rounded up to a few sizes, and the stages that are captured. Missing rows are
filled with the dummy slot.

Common shapes are captured before the first request and while the engine is idle. A step of a new shape is padded to a
captured one that stands in for it (step_shapes.py). Without one, it runs operation by operation. In both cases the
device may still be busy with the step while the host captures the new shape: at once if nothing stands in for it, else
when padding has cost as much as a capture. All graphs share one memory pool, because they run one after the other. The
memory of a graph itself is never returned, so the number of graphs is limited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from quire.types import StepPlan
from quire.worker.memory.out_of_memory import is_out_of_memory
from quire.worker.staging import Staging
from quire.worker.step.batch import DeviceStep, FirstEntries, SameObjects
from quire.worker.step.kernel_batch import KernelBatcher
from quire.worker.step.stage_functions import StageFunctions
from quire.worker.step.step_shapes import GraphLimits, StandIns, StepShape, StepShapes
from quire.worker.step.step_stages import LOGITS, NO_STAGES

log = logging.getLogger("quire")


class CudaGraphs:
    """Launcher that replays captured steps.

    It captures steps of up to `limits.max_tokens` tokens, and steps of exactly `limits.full_tokens`, as happen while
    prompts queue up. It runs no stage of other long steps, which would need padding.
    """

    def __init__(
        self,
        stages: StageFunctions,
        batcher: KernelBatcher,
        limits: GraphLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stages, self._batcher = stages, batcher
        self._set_limits(limits)
        # One buffer of logits for all sizes: one for each size would add up to gigabytes.
        most = (limits.max_logit_rows or limits.max_rows) if stages.has_head else 0
        self._logits = torch.empty(most, stages.model.spec.vocab_size, dtype=dtype, device=device)
        self._first_logits = FirstEntries(self._logits)
        self._stream = torch.cuda.Stream(device)  # to capture on: nothing runs there
        self._first: torch.cuda.CUDAGraph | None = self._begin_pool()

    def _set_limits(self, limits: GraphLimits) -> None:
        self.shapes = StepShapes(limits)
        self._limits, self._max_graphs = limits, limits.max_graphs
        self._captured: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._stand_ins = StandIns()
        self._source = SameObjects()  # the columns of the newest step
        self._wanted: StepShape | None = None  # its shape
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

    def launch(self, plan: StepPlan, staging: Staging) -> DeviceStep:
        wanted = self._shape_of(plan)
        if wanted is None:
            return self._batcher.open(plan, staging)
        graph, shape, captures = self._captured.get(wanted), wanted, False
        if graph is None:
            shape, captures = self._stand_ins.choose(wanted, self._captured, self._has_room)
            graph = self._captured.get(shape)
        step = self._batcher.open(plan, staging, shape)
        if graph is None:
            self._run(shape)
        else:
            graph.replay()
            if shape.prefix != wanted.prefix:
                self._finish(replace(shape, prefix=wanted.prefix))
        if captures:  # while the device runs the step
            self._capture(wanted)
        step.done, step.logits = wanted.prefix.last, self._first_logits[len(step.logit_rows.slots_host)]
        return step

    @property
    def _has_room(self) -> bool:
        return self._may_capture and len(self._captured) < self._max_graphs

    def capture_common(self) -> None:
        for shape in self.shapes.at_start():
            self._capture(shape)

    def run_common(self, most: int | None = None) -> None:
        for shape in self.shapes.with_all_kernels()[:most]:
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
        prefix = self._stages.prefix(plan)
        brief = self._is_brief(plan)  # contexts grow while the batch stays the same
        # The steps of an unchanged batch have the same columns.
        if self._source.come_again(plan.slots, plan.num_tokens, plan.num_drafts, plan.shared, prefix, brief):
            return self._wanted
        shares, drafts = plan.shared is not None, plan.max_drafts
        longest = 1 + drafts + plan.has_prompts
        self._wanted = None
        if prefix is not NO_STAGES:
            self._wanted = self.shapes.fit(
                len(plan.slots), plan.total_tokens, prefix, shares, drafts, longest, brief
            )
        return self._wanted

    def _is_brief(self, plan: StepPlan) -> bool:
        rows, brief = len(plan.slots), self._limits.brief
        return (
            rows <= brief.rows
            and rows == plan.total_tokens
            and brief.has(rows, int(plan.starts.sum()) + rows)
        )

    def _run(self, shape: StepShape) -> None:
        """Run the captured stages of `shape` with the current header."""
        step = self._batcher.padded(shape)
        self._stages.run(step, shape.prefix.last)
        if shape.prefix == LOGITS and self._stages.has_head:
            self._logits[: shape.logit_rows].copy_(step.logits)

    def _finish(self, shape: StepShape) -> None:
        """Run the stages of `shape` behind the logits, after a graph that ends with these."""
        step = self._batcher.padded(shape)
        step.done, step.logits = LOGITS.last, self._logits[: shape.logit_rows]
        self._stages.run(step, shape.prefix.last)

    def _capture(self, shape: StepShape) -> None:
        """Capture the stages of `shape`, if there is room for another graph."""
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
