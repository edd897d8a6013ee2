"""Drafts of a head that continues the hidden states of the model: EAGLE-3, EAGLE and multi-token prediction.

    step n     model runs tokens m-1 .. m+k-1          `learn` keeps its hidden states in a ring by position
               tokens m .. n-1 are output
    step n+1   head runs the pairs up to n-2           their states are the model's
               head runs k-1 more, one by one          on its own states
               model runs tokens n-1 .. n+k-1

A pair is a token and the states of the position in front of it (models/heads/base.py). The entries of the head are a
further layer of the same KV blocks, at the position of the states. Steps with prompts run the head on the same batch.
Steps in which nothing is drafted do not run it. The ring keeps their states, and `keep_up` runs the head on them before
they are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, ForwardBatch, KVLayer
from quire.models.decoder import Model
from quire.models.heads.base import DraftHead
from quire.models.spec import ModelSpec
from quire.speculation.draft_batch import draw
from quire.speculation.drafter import DraftContext, Drafter, DraftRows
from quire.speculation.head_pairs import StateRing, pick_pairs, rows_of_tokens
from quire.speculation.pauses import Pauses, batches
from quire.types import SlotAdmission, StepPlan

_SPAN = 32  # positions whose states are kept for the head
_CATCH_UP_TOKENS = 2048  # that the head runs at once outside of steps, which bounds the memory for them


class FeatureDrafter(Drafter):
    """A `Drafter` that runs `head` on the hidden states of the model.

    Args:
        head: the draft head.
        backend: attention back end of its layer.
        context: the parts of the worker.
        most: most draft tokens of a row.
        width: hidden size of the head.
        dtype: of hidden states.
    """

    def __init__(
        self,
        head: DraftHead,
        backend: AttentionBackend,
        context: DraftContext,
        most: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._head, self._backend, self._context, self._columns = head, backend, context, context.columns
        # Up to `most` positions behind the known tokens are written by rejected drafts, and up to `_span` in front of
        # them are read.
        self._window = 1 + most
        self._span = max(min(_SPAN, context.columns.tokens.shape[1] - 1), 1 + most)
        slots, device = len(context.columns.num_tokens), context.device
        reach = self._span + 1 + most
        self._ring = StateRing(
            torch.zeros(slots * reach, width, dtype=dtype, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            reach,
        )
        self._source = pick_pairs(context, backend, self._ring)
        self._pauses = Pauses(slots, lambda drafts: 1 + drafts)

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        # The states of positions in the prefix cache are unknown, and their entries of the head must stay.
        slots = torch.tensor([admission.slot for admission in admissions])
        begin = torch.tensor([admission.computed for admission in admissions])
        device = self._ring.begins.device
        self._ring.begins[slots.to(device)] = begin.to(device)

    def keep_up(self, plan: StepPlan) -> None:
        lacking = self._pauses.begin(plan)
        # If the states of one row have to be used now, those of others soon have to, too.
        least = self._span // 2 if lacking.max(initial=0) >= self._span else self._span
        slots = plan.slots[(lacking >= least) | ((lacking > self._window) & (plan.num_drafts > 0))]
        for part in batches(slots, self._span, _CATCH_UP_TOKENS):
            at = torch.from_numpy(part).long().to(self._ring.begins.device)
            rows = DraftRows(at, torch.zeros_like(at), 0, plan.max_seq_len)
            pairs = self._source.make(rows, 0, self._span)
            self._head(self._ring.states[pairs.places], pairs.batch)
        self._pauses.fill(slots)
        self._pauses.end(plan)

    # --------------------------------------------------------------------------- after the model

    def learn(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Keep the states of the model after a step, and run the head on the tokens of prompts.

        Args:
            batch: the step.
            hidden: the last hidden states of all tokens, [tokens, hidden]; used by heads that read no other.
        """
        states = self._head.combine(hidden)
        self._source.keep(states, batch)
        if not batch.decodes_only:
            slots = rows_of_tokens(batch)[1]
            following = (batch.positions + 1).clamp_(max=self._columns.tokens.shape[1] - 1)
            kv = self._context.kv
            others = [replace(other, kv=kv) for other in batch.others]
            own = replace(
                batch, input_ids=self._columns.tokens[slots, following].long(), kv=kv, attn=None, others=others,
                group_of=self._context.group_of,
            )  # fmt: skip
            own.plan(self._backend)
            self._head(states, own)

    # -------------------------------------------------------------------------- before the model

    def propose(self, rows: DraftRows) -> None:
        hidden: Tensor | None = None
        for draft in range(rows.most):
            # A row that drafts no more stays behind its last draft, so that it never leaves the context.
            pairs = self._source.make(rows, draft, 1 if draft else self._window)
            states = self._ring.states[pairs.places] if hidden is None else hidden
            hidden = self._head(states, pairs.batch)
            logits = self._head.logits(hidden)
            drafts = draw(self._context, logits, pairs.batch.slots, pairs.lengths)
            self._source.write(rows, pairs, drafts, draft)


class ObservedModel:
    """A `Model` that shows its hidden states to a drafter after each step.

    Args:
        model: the model.
        learn: `FeatureDrafter.learn`.
        reads_all: the head needs the last hidden state of every token, also of those in prompts.
    """

    def __init__(self, model: Model, learn: Callable[[ForwardBatch, Tensor], None], reads_all: bool) -> None:
        self._model, self._learn, self._reads_all = model, learn, reads_all
        self.spec: ModelSpec = model.spec

    @property
    def attention_layers(self) -> Sequence[KVLayer]:
        return self._model.attention_layers

    def __call__(self, batch: ForwardBatch) -> Tensor:
        wanted = batch.wanted
        if self._reads_all:
            batch.wanted = None
        hidden = self._model(batch)
        batch.wanted = wanted
        self._learn(batch, hidden)
        return hidden.index_select(0, wanted) if self._reads_all and wanted is not None else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)
