"""Drafters and forced answers for benchmarks/speculation.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from keyword import kwlist
from pathlib import Path

import torch
from torch import Tensor

from quire.attention.base import ForwardBatch, KVLayer
from quire.models.decoder import Model
from quire.models.spec import ModelSpec
from quire.speculation.drafter import DraftContext, Drafter, DraftRows
from quire.speculation.ngram import NgramDrafter
from quire.types import SlotAdmission

_SOURCES = Path(__file__).parent.parent / "src" / "quire"


class CoinDrafter(Drafter):
    """Drafts of token 0 with a set probability, independently for each position, and of token 1 otherwise."""

    def __init__(self, context: DraftContext) -> None:
        self._columns, device = context.columns, context.device
        self.share = torch.zeros(1, dtype=torch.int64, device=device)  # of 2^16
        self._offset = torch.arange(16, device=device)

    def propose(self, rows: DraftRows) -> None:
        slots = rows.slots.long().unsqueeze(1)
        place = self._columns.num_tokens[slots] + self._offset[: rows.most]
        coin = (slots * 0x9E3779B1 + place * 0x85EBCA77) & 0xFFFFFFFF
        for factor in (0x7FEB352D, 0x846CA68B):
            coin = ((coin ^ (coin >> 15)) * factor) & 0xFFFFFFFF
        coin >>= 16
        place = place.clamp(max=self._columns.tokens.shape[1] - 1)
        self._columns.tokens[slots, place] = (coin >= self.share).int()


class EditDrafter(NgramDrafter):
    """Prompt lookup that also holds the answers to force.

    Args:
        context: the parts of the worker.
        answers: token ids by request, whose id begins with the key and a hyphen.
    """

    def __init__(self, context: DraftContext, answers: dict[str, list[int]]) -> None:
        super().__init__(context.columns, context.device)
        self._answers = answers
        self.script = torch.zeros_like(
            context.columns.tokens
        )  # int32 [slots, length]: the token at each position

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        for admission in admissions:
            answer = self._answers.get(admission.request.id.split("-")[0], [])
            row = torch.tensor(answer, dtype=torch.int32, device=self.script.device)
            begin = len(admission.request.prompt)
            self.script[admission.slot, begin : begin + len(row)] = row


class ForcedModel:
    """A `Model` whose logits are overridden by a high one for the token of a script.

    Args:
        model: the model, which runs as usual.
        script: int32 [slots, length], the token at each position.
    """

    def __init__(self, model: Model, script: Tensor) -> None:
        self._model, self._script = model, script
        self.spec: ModelSpec = model.spec
        self._forced: Tensor  # int64 [logit rows, 1]

    @property
    def attention_layers(self) -> Sequence[KVLayer]:
        return self._model.attention_layers

    def __call__(self, batch: ForwardBatch) -> Tensor:
        ends = batch.query_start[1:].contiguous()
        at = batch.logit_index
        row = torch.searchsorted(ends, at.int(), right=True).clamp_(max=len(batch.slots) - 1)
        following = (batch.positions[at].long() + 1).clamp_(max=self._script.shape[1] - 1)
        self._forced = self._script[batch.slots[row].long(), following].long().unsqueeze(1)
        return self._model(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden).scatter_(1, self._forced, 1e4)


def edits(count: int, prompt: int, answer: int, vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers of a copy-heavy workload: rename the most frequent name in a Python file.

    The files are those of Quire. A token is a word, a run of spaces or a punctuation mark.

    Args:
        count: number of requests.
        prompt, answer: tokens of each.
        vocab_size: upper bound of the token ids.
    """
    found: list[tuple[list[int], list[int]]] = []
    ids: dict[str, int] = {}
    for path in sorted(_SOURCES.rglob("*.py")):
        pieces = re.findall(r" ?\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8"))[:prompt]
        if len(pieces) < prompt or len(found) == count:
            continue
        names = Counter(
            piece.strip() for piece in pieces[:answer] if re.fullmatch(r" ?[A-Za-z_]\w{3,}", piece)
        )
        name = next(name for name, _ in names.most_common() if name not in kwlist)
        edited = [piece.replace(name, name + "2") if piece.strip() == name else piece for piece in pieces]
        sides = ([ids.setdefault(p, len(ids) + 1) for p in side] for side in (pieces, edited[:answer]))
        found.append((next(sides), next(sides)))
    assert len(found) == count and len(ids) < vocab_size
    return found
