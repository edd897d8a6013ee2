"""`EngineJob`: one prompt with its choices on the way to a replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.types import EngineRequest

if (
    TYPE_CHECKING
):  # it imports the libraries of tokenizers, and engine processes start before those are needed
    from quire.frontend.output import RequestState


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

    @property
    def generated_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.state.answers)

    @property
    def has_begun(self) -> bool:
        """Return whether there is output, so that another replica cannot start again without repeating it."""
        return any(answer.token_ids or answer.finish_reason for answer in self.state.answers)
