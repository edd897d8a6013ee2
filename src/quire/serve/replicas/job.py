"""`EngineJob`: one prompt with its choices on the way to a replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import frame
from quire.types import EngineRequest

if (
    TYPE_CHECKING
):  # it imports the libraries of tokenizers, and engine processes start before those are needed
    from quire.frontend.output import RequestState


def encode_requests(requests: Iterable[EngineRequest]) -> bytes:
    """Return the messages that add the requests to an engine."""
    return b"".join(frame(msg.encode(msg.Add(request))) for request in requests)


class ExpectedBlocks:
    """The short names of the blocks that open jobs are to compute."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()  # jobs by name; no zeros

    def __contains__(self, name: object) -> bool:
        return name in self._counts

    def add(self, job: EngineJob) -> None:
        """Add the blocks of a job."""
        self._counts.update(job.names)

    def remove(self, job: EngineJob) -> None:
        """Remove the blocks of a job, except those that another job is to compute."""
        self._counts.subtract(job.names)
        for name in job.names:
            if not self._counts[name]:
                del self._counts[name]


@dataclass(slots=True, eq=False)
class EngineJob:
    """One prompt with its n choices, which run on one replica.

    Args:
        state: what has been generated.
        requests: one engine request per choice.
        frames: the encoded messages that add the requests.
        names: short names of the full blocks of the prompt, by which it is found in prefix caches; empty if the
            request cannot use cached tokens or nothing reads them.
        priority: lower goes first; 0 for all under `scheduling_policy="fcfs"`.
    """

    state: RequestState
    requests: list[EngineRequest]
    frames: bytes
    names: list[bytes] = field(default_factory=list)
    priority: int = 0
    number: int = 0  # of arrival at the replicas
    retries: int = 0
    aborted: bool = False  # its client no longer wants it
    open_ids: set[str] = field(default_factory=set)  # requests that the engine has not ended

    @property
    def client(self) -> str:
        return self.requests[0].client

    @property
    def weight(self) -> float:
        return self.requests[0].weight

    @property
    def prompt_tokens(self) -> int:
        return len(self.state.prompt_token_ids)

    @property
    def uncached_tokens(self) -> int:
        """Return the prompt tokens that are probably to be computed: the choices after the first find its blocks."""
        return self.prompt_tokens - self.requests[0].likely_cached

    def expect_cached(self, tokens: int) -> None:
        """Raise the cached prompt tokens of the first choice to `tokens`: other jobs have come since this one was made."""
        if tokens > self.requests[0].likely_cached:
            self.requests[0] = replace(self.requests[0], likely_cached=tokens)
            self.frames = encode_requests(self.requests)

    @property
    def generated_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.state.answers)

    @property
    def has_begun(self) -> bool:
        """Return whether there is output, so that another replica cannot start again without repeating it."""
        return any(answer.token_ids or answer.finish_reason for answer in self.state.answers)
