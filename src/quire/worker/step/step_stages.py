"""The stages that every step passes, and the prefix of them that may be captured.

A launcher runs the captured first stages in one call; the runner runs the others one by one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class StepStage(IntEnum):
    """The stages of a step, in order."""

    OPEN = 0  # the host has sent the indices of the step
    PREPARE = 1  # draft tokens and the ragged batch
    MODEL = 2  # hidden states
    HEAD = 3  # logits
    SAMPLE = 4  # one token for each row of logits
    COMMIT = 5  # slot columns and tokens for the host


class Prefix(NamedTuple):
    """The first stages of a step, which need nothing from the host once it has sent the indices."""

    last: StepStage
    filters: bool = False  # if SAMPLE is among them: rows may have top_k, top_p or min_p


NO_STAGES = Prefix(StepStage.OPEN)
LOGITS = Prefix(StepStage.HEAD)
TOKENS = Prefix(StepStage.COMMIT)
FILTERED_TOKENS = Prefix(StepStage.COMMIT, filters=True)
