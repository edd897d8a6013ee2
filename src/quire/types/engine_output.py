"""The outcome of a step for its requests. Apart from the other types, because importing msgspec takes a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec

from quire.types.engine_io import ExportedBlocks, RequestFailure, Timing, TokenLogprobs
from quire.types.sampling_params import FinishReason


class EngineOutput(msgspec.Struct, omit_defaults=True, gc=False, tag=1):
    """The outcome of one step for one request. Exactly one output of each request has finish_reason set.

    `prompt_logprobs` holds the entries of the prompt positions from `prompt_logprobs_start` on, each once. This is a
    `Struct`, which takes a third of the time of a dataclass to make. It refers to no object that refers to it, so the
    garbage collector need not track it.
    """

    id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id; None for end of sequence
    num_cached_tokens: int = 0  # with the first token, and with any output that is more than a token
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 1
    pooled: bytes | None = None  # float32 [hidden]
    error: RequestFailure | None = None  # set if, and only if, finish_reason is "error"
    exported: list[ExportedBlocks] | None = None  # of a request that exports
    timing: Timing | None = None  # with the first token, the first after a preemption, and the last output


class NewTokens(msgspec.Struct, gc=False, tag=2):
    """The outcome of one step for all requests to which it brought one token and nothing else. Read-only.

    These are most rows of most steps, so they are columns: nothing is made for each request.
    """

    ids: list[str]  # of the requests; steps of an unchanged batch share the list
    tokens: list[int]

    def outputs(self) -> Iterator[EngineOutput]:
        """Iterate over the same as one output per request."""
        return map(EngineOutput, self.ids, [[token] for token in self.tokens])


OutputPart = EngineOutput | NewTokens


def one_by_one(parts: Iterable[OutputPart]) -> Iterator[EngineOutput]:
    """Iterate over outputs, one per request and step."""
    for part in parts:
        if isinstance(part, NewTokens):
            yield from part.outputs()
        else:
            yield part


class EngineOutputs(Sequence[EngineOutput]):
    """The outputs of one or more steps. Those of one request are in the order of the steps.

    Attributes:
        parts: the same, with many outputs in one object. Who reads these saves the time to make one for each.
    """

    __slots__ = ("_outputs", "parts")

    def __init__(self, parts: list[OutputPart]) -> None:
        self.parts = parts
        self._outputs: list[EngineOutput] | None = None

    @property
    def _each(self) -> list[EngineOutput]:
        if self._outputs is None:
            self._outputs = list(one_by_one(self.parts))
        return self._outputs

    @property
    def ended(self) -> list[EngineOutput]:
        """Return the outputs of requests that have ended."""
        return [
            part for part in self.parts if isinstance(part, EngineOutput) and part.finish_reason is not None
        ]

    @overload
    def __getitem__(self, index: int) -> EngineOutput: ...
    @overload
    def __getitem__(self, index: slice) -> list[EngineOutput]: ...
    def __getitem__(self, index: int | slice) -> EngineOutput | list[EngineOutput]:
        return self._each[index]

    def __len__(self) -> int:
        return len(self._each)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __iter__(self) -> Iterator[EngineOutput]:
        return iter(self._each)
