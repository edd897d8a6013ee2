"""`DraftCounts`: how many draft tokens were verified and accepted, for statistics and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of verified drafts, of an engine or of a run."""

    rows: int = 0  # that verified drafts
    tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()  # by position among the drafts of a row

    @classmethod
    def of_totals(cls, totals: Mapping[str, Any]) -> DraftCounts:
        """Return the counts in `EngineStats.totals`."""
        rows, tokens, accepted = totals["draft_rows"], totals["draft_tokens"], totals["accepted_tokens"]
        return cls(rows, tokens, accepted, tuple(totals["accepted_at"]))

    @classmethod
    def of_stats(cls, drafts: Mapping[str, Any]) -> DraftCounts:
        """Return the counts in the `drafts` of /stats."""
        return cls(drafts["rows"], drafts["tokens"], drafts["accepted"], tuple(drafts["accepted_at"]))

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Return the counts without those of an earlier moment."""
        at = (now - then for now, then in zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0))
        rows, tokens = self.rows - earlier.rows, self.tokens - earlier.tokens
        return DraftCounts(rows, tokens, self.accepted - earlier.accepted, tuple(at))

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were accepted, 0 without drafts."""
        return self.accepted / self.tokens if self.tokens else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Mean number of tokens that a row with drafts generated."""
        return 1 + self.accepted / self.rows if self.rows else 1.0

    @property
    def rates(self) -> list[float]:
        """Share of the rows with drafts that accepted the draft at each position."""
        return [count / self.rows for count in self.accepted_at] if self.rows else []
