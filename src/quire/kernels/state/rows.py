"""`StateRows`: which state each row of a ragged batch continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Kernels exist for these numbers of rows, which are those of most captured steps, and for powers of two beyond.
_PADS = (8, 32, 256, 1024)


def rows_pad(count: int) -> int:
    """Return the power of two, at least `count`, for which a kernel that holds numbers of all rows is compiled."""
    return next((pad for pad in _PADS if pad >= count), 1 << (count - 1).bit_length())


@dataclass(slots=True)
class StateRows:
    """The rows of a ragged batch: row r owns the tokens starts[r] .. starts[r + 1] and the state `index[r]`.

    Rows without tokens and tokens behind the last row are padding. A row reads its state once, before anything is
    written, so `targets` may name the same state.
    """

    index: torch.Tensor  # int64 [rows]: index of each row's state; padding rows have the last state, a dummy
    starts: torch.Tensor  # int32 [rows + 1]
    fresh: torch.Tensor  # bool [rows]: whether the state counts as zeros, because the request begins here
    counts: np.ndarray | None = None  # host, int32 [rows]: tokens per row; None: only the device knows
    # int64 [tokens]: index of the state after each token, -1 to drop it; None: the state after a row's last token
    # replaces the row's state.
    targets: torch.Tensor | None = None
    short_only: bool = False  # whether no row has more than `most` tokens
    most: int = 1  # most tokens of a row that decodes

    @classmethod
    def of(cls, batch: Any) -> StateRows:
        """Return the rows of a step (`ForwardBatch`)."""
        return cls(
            batch.state_rows,
            batch.query_start,
            batch.fresh,
            batch.num_tokens,
            batch.state_targets,
            batch.decodes_only,
            batch.decode_tokens,
        )

    def all_longer(self, tokens: int) -> bool:
        """Return whether all rows with tokens have more than `tokens`; False if only the device knows."""
        return self.counts is not None and bool(((self.counts > tokens) | (self.counts == 0)).all())

    def spans(self) -> list[tuple[int, int, int, bool]]:
        """Return (state index, first token, end, fresh) of the rows with tokens; waits for the device if it has to."""
        starts = self.starts.tolist()
        rows = zip(self.index.tolist(), starts, starts[1:], self.fresh.tolist())
        return [row for row in rows if row[2] > row[1]]

    def owners(self, tokens: int) -> torch.Tensor:
        """Return the row of each of `tokens` tokens, int64 [tokens]; padding tokens have the last row."""
        at = torch.arange(tokens, device=self.starts.device, dtype=self.starts.dtype)
        return torch.searchsorted(self.starts[1:], at, right=True).clamp_(max=len(self.index) - 1)
