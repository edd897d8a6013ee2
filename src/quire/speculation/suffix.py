"""Drafts from earlier answers of the same client: the tokens that followed the longest match of the last tokens.

A client that asks similar things gets similar answers: the same file edited again, the same form filled in, steps of an
agent. The newest answers are kept on the device, so that drafts wait for no host. An answer is copied when its slot gets
a new owner. The least recently matched answer makes room. Source of the idea: SuffixDecoding (arXiv:2411.04975), whose
suffix tree a scan over bounded memory replaces.

The request's own tokens are searched as by `ngram`. An earlier answer is used if it matches at least as many tokens as
that method looks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from quire.speculation.drafter import DraftColumns, Drafter, DraftRows
from quire.speculation.ngram import LONGEST, NgramDrafter
from quire.types import SlotAdmission

_ANSWERS, _WIDTH = 64, 1024  # kept answers, and the tokens kept of each
_LONGEST = 8  # tokens of the suffix that is looked for
_NEVER = torch.iinfo(torch.int64).max


class SuffixDrafter(Drafter):
    """A `Drafter` that looks for the last tokens of a request in earlier answers of its client, then in its own tokens."""

    def __init__(self, columns: DraftColumns, device: torch.device, answers: int = _ANSWERS) -> None:
        """Keep up to `answers` answers."""
        self._columns, self._own = columns, NgramDrafter(columns, device)
        # `_LONGEST` places in front of an answer, so that matches may be compared at every token. The last row is for
        # writes without effect.
        self._answers = torch.full((answers + 1, _LONGEST + _WIDTH), -1, dtype=torch.int32, device=device)
        self._clients = torch.zeros(answers + 1, dtype=torch.int64, device=device)
        self._used = torch.zeros(answers + 1, dtype=torch.int64, device=device)  # tick of the last match
        self._used[-1] = _NEVER
        self._tick = torch.ones(1, dtype=torch.int64, device=device)
        self._client_of = torch.zeros(len(columns.num_tokens), dtype=torch.int64, device=device)  # by slot
        self._owned: set[int] = set()  # slots that had an owner

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        for admission in admissions:
            slot = admission.slot
            if slot in self._owned:
                self._keep(slot)
            self._owned.add(slot)
            self._client_of[slot] = _number(admission.request.client)

    def _keep(self, slot: int) -> None:
        """Copy the answer in a slot, if there is one, over the least recently used one."""
        columns, answers = self._columns, self._answers
        begin = columns.prompt_len[slot].long()
        count = columns.num_tokens[slot] - begin
        offset = torch.arange(_WIDTH, device=answers.device)
        answer = columns.tokens[slot].index_select(
            0, (begin + offset).clamp_(max=columns.tokens.shape[1] - 1)
        )
        nowhere = len(answers) - 1
        place = torch.where(count > 0, self._used.argmin(), nowhere).view(1)
        answers[place, _LONGEST:] = answer.masked_fill(offset >= count, -1).unsqueeze(0)
        self._clients[place] = self._client_of[slot]
        self._touch(place)

    def _touch(self, answers: Tensor) -> None:
        """Mark answers as used now."""
        self._used[answers] = self._tick
        self._used[-1:] = _NEVER
        self._tick += 1

    def propose(self, rows: DraftRows) -> None:
        self._own.propose(rows)
        slots = rows.slots.long()
        answer, place, length = self._longest_match(slots)
        found = length >= LONGEST
        self._touch(torch.where(found, answer, len(self._answers) - 1))
        offset = torch.arange(rows.most, device=slots.device)
        source = place.unsqueeze(1) + offset  # [rows, most]
        drafts = self._answers[answer.unsqueeze(1), source.clamp(max=self._answers.shape[1] - 1)]
        tokens = self._columns.tokens
        target = self._columns.num_tokens[slots].unsqueeze(1) + offset
        writes = found.unsqueeze(1) & (offset < rows.counts.unsqueeze(1)) & (drafts >= 0)
        writes &= (source < self._answers.shape[1]) & (target < tokens.shape[1])
        target = target.clamp_(max=tokens.shape[1] - 1).long()
        at = slots.unsqueeze(1)
        tokens[at, target] = torch.where(writes, drafts, tokens[at, target])

    def _longest_match(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the longest suffix of each slot's tokens in the answers of its client.

        Returns:
            The answer, the place behind the match in it, and the number of tokens that match, each int64 [rows].
        """
        known = self._columns.num_tokens[slots].long()
        body = self._answers[:, _LONGEST:]
        matches = (body >= 0) & (self._clients == self._client_of[slots].unsqueeze(1)).unsqueeze(2)
        length = torch.zeros_like(matches, dtype=torch.int16)  # [rows, answers, places]
        for back in range(1, _LONGEST + 1):
            last = self._columns.tokens[slots, (known - back).clamp_(min=0)].view(-1, 1, 1)
            matches &= self._answers[:, _LONGEST - back : -back] == last
            length += matches
        best, at = length.flatten(1).max(1)
        return at // _WIDTH, at % _WIDTH + _LONGEST, best.long()


def _number(client: str) -> int:
    """Return a number that stands for a client, int64."""
    return int.from_bytes(blake2b(client.encode(), digest_size=8).digest(), signed=True)
