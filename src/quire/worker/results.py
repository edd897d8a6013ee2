"""Transfer of results to the host.

On CUDA the last kernel of a step writes the tokens to pinned memory. Other results are copied on a side stream into
pinned memory, so the compute stream never waits. The host waits only in `StepHandle.wait`. A handle keeps the tensors
that it copies alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.types import LogprobArrays, StepResult

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

    def to_result(self, host: list[torch.Tensor]) -> StepResult:
        """Build the result from host copies of the tensors that `tensors` returns."""
        arrays = iter(x.numpy() for x in host)
        rows = slice(None) if self.samples is None else self.samples
        tokens = next(arrays)[rows]
        if self.logit_samples is not None:
            rows = self.logit_samples
        logprobs = LogprobArrays(*(next(arrays)[rows] for _ in range(3))) if self.logprobs else None
        scores = {row: LogprobArrays(*(next(arrays) for _ in range(3))) for row in self.prompt_logprobs}
        pooled = None if self.pooled is None else dict(zip(self.pool_rows, next(arrays)))
        return StepResult(self.step, tokens, logprobs, scores or None, pooled)


class HostHandle:
    """Handle of results that are already on the host."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._output.to_result(self._output.tensors())


class CudaHandle:
    """Handle of results on a GPU. Their copy to pinned memory is queued on `stream`, and `done` marks its end."""

    def __init__(self, output: StepOutput, stream: torch.cuda.Stream, done: torch.cuda.Event) -> None:
        self._output, self._done = output, done
        self._host = self._source = output.tensors()
        if any(x.is_cuda for x in self._source):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._host = [self._copy(x, stream) if x.is_cuda else x for x in self._source]
                done.record(stream)
        else:
            done.record()

    def _copy(self, source: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source, non_blocking=True)
        source.record_stream(stream)
        return host

    def ready(self) -> bool:
        return self._done.query()

    def wait(self) -> StepResult:
        self._done.synchronize()
        return self._output.to_result(self._host)


class Results:
    """Factory of handles. Owns the copy stream, and an event for each of `turns` steps that may be in flight."""

    def __init__(self, device: torch.device, turns: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events = [torch.cuda.Event() for _ in range(turns)] if self._stream else []

    def handle(self, output: StepOutput) -> HostHandle | CudaHandle:
        """Return the handle of a step's results, and start their copy to the host."""
        if self._stream is None:
            return HostHandle(output)
        return CudaHandle(output, self._stream, self._events[output.step % len(self._events)])
