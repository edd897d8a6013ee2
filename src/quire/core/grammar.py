"""The grammar seam: what a step may sample. Off is `NoGrammar`, which never needs a token and masks nothing."""

from __future__ import annotations

from typing import Any, Protocol

from quire.types import StepPlan


class Grammar(Protocol):
    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether a mask of this plan depends on tokens still in flight."""
        ...

    def masks(self, plan: StepPlan) -> Any:
        """Packed bits of allowed tokens, int32 [sampling rows, ceil(vocab / 32)], or None."""
        ...


class NoGrammar:
    def needs_tokens(self, plan: StepPlan) -> bool:
        return False

    def masks(self, plan: StepPlan) -> Any:
        return None
