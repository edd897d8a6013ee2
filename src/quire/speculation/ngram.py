"""Prompt lookup: the drafts are the tokens that followed the latest occurrence of the request's last tokens.

The longest suffix of up to `_LONGEST` tokens that occurs earlier in prompt or answer is found, and among equally long
occurrences the latest. Source: "Prompt Lookup Decoding" (Saxena 2023), as in vLLM's `ngram`. A GPU uses the kernel of
kernels/ngram.py, and this module is its reference.
"""

from __future__ import annotations

import torch

from quire.kernels import available
from quire.speculation.drafter import DraftColumns, Drafter, DraftRows

LONGEST = 4  # tokens of the suffix that is looked for


class NgramDrafter(Drafter):
    """A `Drafter` that looks for the last tokens of a request earlier in its own tokens."""

    def __init__(self, columns: DraftColumns, device: torch.device) -> None:
        self._columns = columns
        self._has_kernel = available(device)

    def propose(self, rows: DraftRows) -> None:
        if self._has_kernel:
            # Imported here: an installation for CPUs has no Triton.
            from quire.kernels.ngram import propose

            propose(
                self._columns.tokens, self._columns.num_tokens, rows.slots, rows.counts, rows.most, LONGEST
            )
        else:
            self.propose_plain(rows)

    def propose_plain(self, rows: DraftRows) -> None:
        """Do the same as the kernel in plain PyTorch."""
        slots, tokens = rows.slots.long(), self._columns.tokens
        known = self._columns.num_tokens[slots].long().unsqueeze(1)  # [rows, 1]
        own = tokens[:, : rows.reach].index_select(0, slots)  # [rows, reach]
        source = first_draft(own, known, LONGEST)
        offset = torch.arange(rows.most, device=own.device)
        # Behind the newest token the copy repeats itself.
        period = (known - source).clamp_(min=1)
        drafts = own.gather(1, (source + offset % period).clamp_(max=own.shape[1] - 1))
        place = known + offset
        fits = (offset < rows.counts.unsqueeze(1)) & (place < tokens.shape[1])
        tokens[slots.unsqueeze(1).expand_as(place)[fits], place[fits]] = drafts[fits]


def first_draft(own: torch.Tensor, known: torch.Tensor, longest: int) -> torch.Tensor:
    """Return the position of the token that follows the best earlier occurrence of the last tokens.

    Args:
        own: int32 [rows, length], the tokens of each row.
        known: int64 [rows, 1], how many of them are known.
        longest: longest suffix to look for.

    Returns:
        int64 [rows, 1]; 0 if not even the last token occurs earlier.
    """
    position = torch.arange(own.shape[1], device=own.device)  # of the token behind an occurrence
    matches = (position > 0) & (position < known)
    length = torch.zeros_like(own, dtype=torch.int64)
    for back in range(1, longest + 1):
        last = own.gather(1, (known - back).clamp_(min=0))
        before = own.roll(back, 1)
        matches = matches & (position >= back) & (before == last)
        length += matches
    best, found = (length * own.shape[1] + position).masked_fill_(length == 0, 0).max(1, keepdim=True)
    return torch.where(best > 0, found, 0)
