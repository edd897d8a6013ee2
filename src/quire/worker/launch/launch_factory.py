"""Factories of batchers and launchers, one for each kind of device. A worker is handed one and makes its runners with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from quire.kernels.cpu.ops import CpuKernels
from quire.models.decoder import NO_BRIEF_STEPS
from quire.types import max_logit_rows
from quire.worker.launch.cpu_replay import CpuReplay
from quire.worker.launch.graphs import CudaGraphs
from quire.worker.launch.launcher import Eager, Launcher, Threads
from quire.worker.memory.sizing import MemoryPlanner, gpu_memory
from quire.worker.step.batch import Batcher, BatchParts
from quire.worker.step.kernel_batch import KernelBatcher
from quire.worker.step.stage_functions import StageFunctions
from quire.worker.step.step_shapes import FULL_TOKENS, MAX_GRAPHS, GraphLimits
from quire.worker.step.torch_batch import TorchBatcher

_GRAPH_BYTES_PER_LAYER = 46 << 10  # of a captured step (measured: up to 1.3 MiB with 28 layers)


class LaunchFactory(Protocol):
    """Factory of the batcher and the launcher of a runner. `depth` is the number of steps in flight at once."""

    depth: int

    def batcher(self, parts: BatchParts) -> Batcher:
        """Return a batcher over `parts`."""
        ...

    def launcher(self, stages: StageFunctions, captures: bool) -> Launcher:
        """Return a launcher of steps that consist of `stages`. Without `captures` it captures nothing."""
        ...

    def reserve(self, largest_step: int, tokens: int) -> int:
        """Return the bytes that captured steps take, for launchers that are made from now on.

        Captured steps run one at a time, so their activations are cut from one allocation.

        Args:
            largest_step: bytes of a step of `tokens` tokens that is not captured.
        """
        ...


@dataclass
class TorchLaunch:
    """Factory for devices without Triton. Given C kernels, its launcher captures their calls."""

    depth: int
    threads: Threads | None = None  # of a CPU
    kernels: CpuKernels | None = None

    def batcher(self, parts: BatchParts) -> Batcher:
        return TorchBatcher(parts)

    def launcher(self, stages: StageFunctions, captures: bool) -> Launcher:
        eager = Eager(stages.batcher, self.threads)
        return eager if self.kernels is None else CpuReplay(eager, stages, self.kernels)

    def reserve(self, largest_step: int, tokens: int) -> int:
        return 0


@dataclass
class GpuLaunch:
    """Factory for GPUs: kernels at both ends of a step, and CUDA graphs."""

    depth: int
    memory: MemoryPlanner
    drafts: int  # most draft tokens of a row
    captures: bool  # replay captured steps; the attention back end can be captured
    capture_at_start: bool
    _shared_bytes: int = field(default=0, init=False)  # of the memory that captured steps share

    def batcher(self, parts: BatchParts) -> Batcher:
        max_rows = parts.state.dummy
        return KernelBatcher(
            parts,
            max_tokens=max(self.memory.limits.max_num_batched_tokens, max_rows),
            max_rows=max_rows,
            turns=self.depth + 1,
            device=self.memory.device,
            max_drafts=self.drafts,
        )

    def launcher(self, stages: StageFunctions, captures: bool) -> Launcher:
        if not (captures and self.captures):
            return Eager(stages.batcher)
        assert isinstance(stages.batcher, KernelBatcher)
        return CudaGraphs(
            stages, stages.batcher, self._graph_limits(stages), self.memory.dtype, self.memory.device
        )

    def reserve(self, largest_step: int, tokens: int) -> int:
        if not self.captures:
            return 0
        longest = min(self.memory.limits.max_num_batched_tokens, FULL_TOKENS)
        logits = self._max_logit_rows * self.memory.spec.vocab_size * self.memory.dtype.itemsize
        self._shared_bytes = largest_step * min(longest, tokens) // tokens + 2 * logits
        return self._shared_bytes + logits + self._max_graphs * self._bytes_per_graph

    @property
    def _max_logit_rows(self) -> int:
        return max_logit_rows(self.memory.limits.max_num_seqs, self.drafts)

    @property
    def _max_graphs(self) -> int:
        """Return the most steps to capture: graphs take at most a hundredth of the device's memory."""
        return min(MAX_GRAPHS, gpu_memory(self.memory.device) // 100 // self._bytes_per_graph)

    @property
    def _bytes_per_graph(self) -> int:
        return _GRAPH_BYTES_PER_LAYER * self.memory.spec.num_layers

    def _graph_limits(self, stages: StageFunctions) -> GraphLimits:
        limits = self.memory.limits
        return GraphLimits.of_sizes(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            shared_bytes=self._shared_bytes,
            max_graphs=self._max_graphs,
            drafts=self.drafts,
            max_logit_rows=self._max_logit_rows,
            at_start=self.capture_at_start,
            brief=getattr(stages.model, "brief", NO_BRIEF_STEPS),  # few models have such steps
        )
