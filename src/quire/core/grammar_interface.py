"""The interface between the step loop and structured output, which restricts the tokens that a step may sample.

`quire.grammar.library` implements it. `NoGrammar` stands for an engine without structured output.

life of a request       calls of the engine
added                   start      the request is held until `settled` names it
a step, launched        needs_tokens, then masks, each once per plan, in order
a step, retired         advance    with the outputs that the scheduler made of the step
its mask is late        paused     then the request gets no row until `settled` names it again
ended                   advance or forget
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.types import EngineRequest, OutputPart, StepPlan, TokenMasks

if TYPE_CHECKING:
    import numpy as np


class GrammarOutcome(NamedTuple):
    """The end of a wait for a grammar or a mask. The request may run, or it ends with `error`.

    `drafts` is True if its masks are quick enough for draft tokens, each of which needs one more mask.
    """

    request_id: str
    error: str | None
    drafts: bool = False


class GrammarPause(NamedTuple):
    """A running request whose next mask is still being computed.

    `drops_token` is True if its row in the newest plan has no mask: the token of that row must not be used.
    """

    request_id: str
    drops_token: bool


class Grammar(Protocol):
    """The structured output of all requests of one engine."""

    def start(self, request: EngineRequest) -> None:
        """Start to compile the grammar of a request, without waiting."""
        ...

    def paused(self) -> list[GrammarPause]:
        """Return the requests that must not be scheduled from now on, until `settled` names them.

        Each request is returned once.
        """
        ...

    def settled(self) -> list[GrammarOutcome]:
        """Return the requests that since the last call became ready to run or unable to continue."""
        ...

    def wait(self) -> None:
        """Wait a moment for a grammar or a mask; called when no request can run."""
        ...

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Return whether a mask of this plan depends on tokens of steps in flight."""
        ...

    def masks(self, plan: StepPlan, drafts: Callable[[], np.ndarray]) -> TokenMasks | None:
        """Return the masks of the rows that sample under a grammar, or None if there is no such row.

        Args:
            plan: the step.
            drafts: waits for the draft tokens of the step, int32 [rows, most drafts]. It is called only if a row with
                a grammar has some.
        """
        ...

    def advance(self, outputs: list[OutputPart]) -> None:
        """Advance the grammars by the tokens of a retired step; remove tokens that break a grammar from `outputs`."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended."""
        ...

    def close(self) -> None: ...


class NoGrammar:
    """A `Grammar` that refuses every request.

    Args:
        lacks: the thing that structured output would need here; it completes "structured_outputs need ...".
    """

    def __init__(self, lacks: str = "a tokenizer, and this engine has none") -> None:
        self._refused: list[GrammarOutcome] = []
        self._message = f"structured_outputs need {lacks}"

    def start(self, request: EngineRequest) -> None:
        self._refused.append(GrammarOutcome(request.id, self._message))

    def paused(self) -> list[GrammarPause]:
        return []

    def settled(self) -> list[GrammarOutcome]:
        refused, self._refused = self._refused, []
        return refused

    def wait(self) -> None:
        pass

    def needs_tokens(self, plan: StepPlan) -> bool:
        return False

    def masks(self, plan: StepPlan, drafts: Callable[[], np.ndarray]) -> TokenMasks | None:
        return None

    def advance(self, outputs: list[OutputPart]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass
