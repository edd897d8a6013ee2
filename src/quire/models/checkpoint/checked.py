"""A checkpoint whose norms, embeddings and head are looked at as they are loaded: damaged ones are reported."""

from __future__ import annotations

import logging
import re

import torch

from quire.models.checkpoint.checkpoint import Checkpoint

_WHOLE = slice(None)
_WATCHED = re.compile(r"norm|\bln_\w+\.|embed_tokens|\bwte\.|\bwpe\.|lm_head")

log = logging.getLogger("quire")


class CheckedCheckpoint(Checkpoint):
    """Hands on what `source` has. `finish` warns, in one line, of watched tensors that are not finite.

    These are the tensors in which a single NaN or infinity reaches every request, or every one with that token.
    All others would cost more than a moment.
    """

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._coming: list[tuple[str, torch.Tensor]] = []  # on a GPU: in place once the source is finished
        self._damaged: list[str] = []

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        found = self._source.tensor(name, shape, rows, cols)
        self._check(name, found)
        return found

    def copy_into(
        self,
        destination: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        rows: slice = _WHOLE,
        cols: slice = _WHOLE,
    ) -> None:
        self._source.copy_into(destination, name, shape, rows, cols)
        if destination.device.type == "cpu":
            self._check(name, destination)
        elif _WATCHED.search(name):
            self._coming.append((name, destination))

    def finish(self) -> None:
        self._source.finish()
        for name, values in self._coming:
            self._check(name, values)
        self._coming.clear()
        if self._damaged:
            more = f" and {len(self._damaged) - 3} more" if len(self._damaged) > 3 else ""
            log.warning(
                "%s%s: not finite in the model's dtype (NaN or infinity); requests that meet it will fail",
                ", ".join(self._damaged[:3]),
                more,
            )

    def close(self) -> None:
        self._coming.clear()
        self._source.close()

    def _check(self, name: str, values: torch.Tensor) -> None:
        # A sum is the quickest test; one that overflows does not decide.
        if not _WATCHED.search(name) or bool(values.sum().isfinite()):
            return
        if not bool(values.isfinite().all()) and name not in self._damaged:
            self._damaged.append(name)
