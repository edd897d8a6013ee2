"""The grammar seam: what a step may sample. Off is `NoGrammar`, which refuses requests that ask for one.

request's life       engine's call
added                start      it is held until `settled` names it
a step, launched     needs_tokens, then masks, both once per plan, in order
a step, retired      advance    with what the scheduler made of it
its mask is late     paused, until `settled` names it again
ended                advance or forget
"""

from __future__ import annotations

from typing import Protocol

from quire.types import EngineOutput, EngineRequest, StepPlan, TokenMasks

Settled = tuple[str, str | None]  # request id; None: it may run, else what it ends with
Paused = tuple[str, bool]  # request id; True: its row in the newest plan has no mask, so drop the token


class Grammar(Protocol):
    def start(self, request: EngineRequest) -> None:
        """Begin to compile what the request asks for. Never waits."""
        ...

    def paused(self) -> list[Paused]:
        """Return the running requests that, since the last call, must not be scheduled until `settled` names them,
        because their next mask is still being computed."""
        ...

    def settled(self) -> list[Settled]:
        """Return the requests that are ready to run, or that cannot go on, since the last call."""
        ...

    def wait(self) -> None:
        """Called when nothing can run: wait a moment for a grammar or a mask."""
        ...

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether a mask of this plan depends on tokens still in flight."""
        ...

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        """The masks of the rows that sample under a grammar; None if there is no such row."""
        ...

    def advance(self, outputs: list[EngineOutput]) -> None:
        """Take in what a retired step brought. An output whose tokens break its grammar loses them."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        ...

    def close(self) -> None: ...


class NoGrammar:
    def __init__(self, lacks: str = "a tokenizer, and this engine has none") -> None:
        """`lacks`: what structured output would need here, for the refusal."""
        self._refused: list[Settled] = []
        self._message = f"structured_outputs need {lacks}"

    def start(self, request: EngineRequest) -> None:
        self._refused.append((request.id, self._message))

    def paused(self) -> list[Paused]:
        return []

    def settled(self) -> list[Settled]:
        if not self._refused:
            return self._refused
        refused, self._refused = self._refused, []
        return refused

    def wait(self) -> None:
        pass

    def needs_tokens(self, plan: StepPlan) -> bool:
        return False

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        return None

    def advance(self, outputs: list[EngineOutput]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass
