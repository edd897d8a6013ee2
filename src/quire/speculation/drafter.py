"""The interface of drafters: they write guesses of the next tokens behind the known tokens of a slot.

A drafter runs at the beginning of the step that verifies its drafts, on the same stream, so that the host decides how
many drafts a row gets when it schedules the step. Whatever is drafted, the output of a request stays the same:
`accepted_counts` in worker/step/torch_batch.py keeps exactly the tokens that the model samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.base import KV, ForwardBatch
from quire.models.decoder import Model
from quire.types import SlotAdmission, StepPlan


class DraftColumns(Protocol):
    """The columns of the device state that drafters use, of S slots."""

    @property
    def tokens(self) -> Tensor: ...  # int32 [S, L], drafts go behind the known tokens

    @property
    def num_tokens(self) -> Tensor: ...  # int32 [S], known tokens

    @property
    def prompt_len(self) -> Tensor: ...  # int32 [S], tokens of the prompt

    @property
    def block_tables(
        self,
    ) -> Sequence[Tensor]: ...  # by group, int32 [S, blocks]; the last slot is the dummy for padding


class TokenChoice(Protocol):
    """`Sampler.choose`: draw a token for each row of logits with the parameters of its slot."""

    def __call__(
        self, logits: Tensor, slots: Tensor, tokens: Tensor, filtered: bool, lengths: Tensor | None
    ) -> None: ...


@dataclass(slots=True)
class DraftRows:
    """The rows of a step. Rows of prompts and padding rows have no drafts."""

    slots: Tensor  # integers [rows], all different except for padding
    counts: Tensor  # integers [rows], the number of drafts that each row verifies
    most: int  # upper bound of `counts`
    reach: int  # upper bound of the number of known tokens of any row


class Drafter:
    """A source of draft tokens. Those that learn nothing from steps inherit `admit`, `keep_up` and `follow`."""

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Learn that slots are about to get new owners. Their columns still hold the old ones."""

    def keep_up(self, plan: StepPlan) -> None:
        """Learn that a step is about to be launched, for drafters that run the tokens of steps without drafts later.

        Its admissions are in the columns. Work that is queued here is in no graph.
        """

    def propose(self, rows: DraftRows) -> None:
        """Write at least `counts` valid token ids behind the known tokens of each row, without waiting for the device.

        Entries past the end of the token column must not be written.
        """
        raise NotImplementedError

    def follow(self, batch: ForwardBatch) -> None:
        """Learn the tokens of a step with prompts, for drafters that keep something of each token."""


class NoDrafter(Drafter):
    """A `Drafter` of an engine whose steps have no drafts."""

    def propose(self, rows: DraftRows) -> None:
        pass


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The parts of a worker that a drafter uses."""

    columns: DraftColumns
    kv: list[KV]  # the blocks of the drafter's layers
    group_of: Sequence[int]  # the group of each of these layers
    block_size: int  # tokens
    vocab_size: int  # of the model that verifies
    choose: TokenChoice
    device: torch.device


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an engine drafts: the factory of its drafter, and the most draft tokens of a row.

    `observe` returns the model that steps run: for drafters that read hidden states, one that shows them.
    """

    make: Callable[[DraftContext], Drafter]
    tokens: int
    observe: Callable[[Model, Drafter], Model] = lambda model, _: model


NO_SPECULATION = Speculation(lambda context: NoDrafter(), 0)
