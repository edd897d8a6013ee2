"""The tokens that a drafter with a network has not run, because steps without drafts do not run it.

A drafter that resumes after such steps would attend to entries that were never written. So it runs the missing tokens
first, many at a time, outside of captured steps: they cost far less there than one by one in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.types import StepPlan


class Pauses:
    """Upper bounds of the number of newest tokens of each slot that a drafter lacks.

    They are counted on the host when a step is launched, so the device may have fewer.

    Args:
        slots: number of slots.
        after_drafts: returns the tokens that the drafter lacks once rows have verified so many drafts, [rows].
    """

    def __init__(self, slots: int, after_drafts: Callable[[np.ndarray], np.ndarray]) -> None:
        self._lacking = np.zeros(slots, np.int64)
        self._after_drafts = after_drafts

    def begin(self, plan: StepPlan) -> np.ndarray:
        """Return the number of tokens that each row of a step lacks before it, [rows], 0 for those of prompts."""
        for admission in plan.admissions:
            self._lacking[admission.slot] = 0
        known = plan.num_tokens - plan.num_drafts
        found: np.ndarray = np.where(known == 1, self._lacking[plan.slots], 0)
        return found

    def fill(self, slots: np.ndarray) -> None:
        """Note that these slots lack nothing."""
        self._lacking[slots] = 0

    def end(self, plan: StepPlan) -> None:
        """Count the tokens that the rows of a step lack once it has run."""
        slots, drafts = plan.slots, plan.num_drafts
        is_prompt = plan.num_tokens - drafts > 1
        added = np.where(is_prompt, plan.samples, self._lacking[slots] + 1)
        self._lacking[slots] = np.where(drafts > 0, self._after_drafts(drafts), added)


def batches(slots: np.ndarray, width: int, most_tokens: int) -> list[np.ndarray]:
    """Cut `slots` into parts of which `width` tokens each are at most `most_tokens` together, at least one slot each."""
    rows = max(1, most_tokens // width)
    return [slots[first : first + rows] for first in range(0, len(slots), rows)]
