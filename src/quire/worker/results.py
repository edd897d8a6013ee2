"""Results on their way to the host. On CUDA they are copied on a side stream into pinned memory, so the
compute stream never waits; `StepHandle.wait` is the only place where the host does. A handle keeps alive
what it copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.types import LogprobArrays, StepResult

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, values, ranks


@dataclass(slots=True)
class StepOutput:
    """Device results of one step; prompt log-probabilities by row."""

    step: int
    tokens: torch.Tensor  # int32 [sampling rows]
    logprobs: Arrays | None
    prompt_logprobs: dict[int, Arrays] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        scores = [x for arrays in self.prompt_logprobs.values() for x in arrays]
        return [self.tokens, *(self.logprobs or ()), *scores]

    def to_result(self, host: list[torch.Tensor]) -> StepResult:
        """Build the result from the tensors of `tensors()` on the host."""
        arrays = iter(x.numpy() for x in host)
        tokens = [[token] for token in next(arrays).tolist()]
        logprobs = LogprobArrays(next(arrays), next(arrays), next(arrays)) if self.logprobs else None
        scores = {
            row: LogprobArrays(next(arrays), next(arrays), next(arrays)) for row in self.prompt_logprobs
        }
        return StepResult(self.step, tokens, logprobs, scores or None)


class HostHandle:
    """Results that are on the host already."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepResult:
        return self._output.to_result(self._output.tensors())


class CudaHandle:
    def __init__(self, output: StepOutput, stream: torch.cuda.Stream) -> None:
        self._output = output
        self._source = output.tensors()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in self._source]
            for host, source in zip(self._host, self._source):
                host.copy_(source, non_blocking=True)
                source.record_stream(stream)
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def wait(self) -> StepResult:
        self._done.synchronize()
        return self._output.to_result(self._host)


class Results:
    """Makes handles; owns the copy stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def handle(self, output: StepOutput) -> HostHandle | CudaHandle:
        return CudaHandle(output, self._stream) if self._stream else HostHandle(output)
