"""Transfer of results to the host.

On CUDA the last kernel of a step writes the tokens to pinned memory. Other results are copied on a side stream into
pinned memory, so the compute stream never waits. The host waits only in `StepHandle.wait`. A handle keeps the tensors
that it copies alive.

The device times its steps itself: what the host sees is late by whatever it did meanwhile, such as launching the kernels
of the next step one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from quire.types import DeviceTimes, LogprobArrays, StepResult

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, values, ranks


@dataclass(slots=True)
class StepOutput:
    """Results of one step, for all of its rows."""

    step: int
    # bool [rows]: the rows whose tokens and log-probabilities are valid; None: all of them
    samples: np.ndarray | None
    # int32 [rows, 1 + most drafts], REJECTED behind the last token of a row; None until the step has sampled
    tokens: torch.Tensor | None
    logprobs: Arrays | None = None
    prompt_logprobs: dict[int, Arrays] = field(default_factory=dict)  # by row
    pool_rows: list[int] = field(default_factory=list)
    logit_samples: np.ndarray | None = None  # `samples` by logit row; None: each row has one
    pooled: torch.Tensor | None = None  # float32 [rows to pool, hidden]

    def tensors(self) -> list[torch.Tensor]:
        """Return all result tensors, in the order that `to_result` expects."""
        scores = [x for arrays in self.prompt_logprobs.values() for x in arrays]
        assert self.tokens is not None
        pooled = () if self.pooled is None else (self.pooled,)
        return [self.tokens, *(self.logprobs or ()), *scores, *pooled]

    def to_result(self, host: list[torch.Tensor], times: DeviceTimes | None = None) -> StepResult:
        """Build the result from host copies of the tensors that `tensors` returns, and the times of the step."""
        arrays = iter(x.numpy() for x in host)
        rows = slice(None) if self.samples is None else self.samples
        tokens = next(arrays)[rows]
        if self.logit_samples is not None:
            rows = self.logit_samples
        logprobs = LogprobArrays(*(next(arrays)[rows] for _ in range(3))) if self.logprobs else None
        scores = {row: LogprobArrays(*(next(arrays) for _ in range(3))) for row in self.prompt_logprobs}
        pooled = None if self.pooled is None else dict(zip(self.pool_rows, next(arrays)))
        return StepResult(self.step, tokens, logprobs, scores or None, pooled, times)


class HostHandle:
    """Handle of results that are already on the host."""

    is_timed = False

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._output.to_result(self._output.tensors())


class StepEvents(NamedTuple):
    """Events that the device times: in front of a step, and behind the copy of its results."""

    begun: torch.cuda.Event
    done: torch.cuda.Event

    @classmethod
    def on(cls, stream: torch.cuda.Stream) -> StepEvents:
        """Return events that have happened, so that a step without another one in front can be timed."""
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(stream)
        done.record(stream)
        return cls(begun, done)


class CudaHandle:
    """Handle of results on a GPU.

    Args:
        output: the results. Those on the device are copied to pinned memory.
        compute: the stream of the step.
        copies: the stream of copies.
        events: those of the step; the end is recorded here.
        last: those of the step in front.
    """

    is_timed = True

    def __init__(
        self,
        output: StepOutput,
        compute: torch.cuda.Stream,
        copies: torch.cuda.Stream,
        events: StepEvents,
        last: StepEvents,
    ) -> None:
        self._output, self._events, self._last = output, events, last
        self._host = self._source = output.tensors()
        if any(x.is_cuda for x in self._source):
            copies.wait_stream(compute)
            with torch.cuda.stream(copies):
                self._host = [self._copy(x, copies) if x.is_cuda else x for x in self._source]
            compute = copies
        events.done.record(compute)

    def _copy(self, source: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source, non_blocking=True)
        source.record_stream(stream)
        return host

    def ready(self) -> bool:
        return self._events.done.query()

    def wait(self) -> StepResult:
        begun, done = self._events
        done.synchronize()
        times = DeviceTimes(begun.elapsed_time(done) * 1e-3, self._last.done.elapsed_time(done) * 1e-3)
        return self._output.to_result(self._host, times)


class Results:
    """Factory of handles. Owns the copy stream, and the events of `turns` steps.

    `turns` is one more than may be in flight: the end of a step is timed from the end of the step in front.
    """

    def __init__(self, device: torch.device, turns: int) -> None:
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events = [StepEvents.on(self._copies) for _ in range(turns)] if self._copies else []
        self._compute = self._copies  # the stream of the newest step

    def begin(self, step: int) -> None:
        """Note that the commands of a step follow."""
        if self._events:
            self._compute = torch.cuda.current_stream()
            self._of(step).begun.record(self._compute)

    def _of(self, step: int) -> StepEvents:
        return self._events[step % len(self._events)]

    def handle(self, output: StepOutput) -> HostHandle | CudaHandle:
        """Return the handle of a step's results, and start their copy to the host."""
        if self._copies is None or self._compute is None:
            return HostHandle(output)
        events, last = self._of(output.step), self._of(output.step - 1)
        return CudaHandle(output, self._compute, self._copies, events, last)
