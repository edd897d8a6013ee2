"""`CheckedCheckpoint`: reports norms, embeddings and heads that are not finite while they are loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import torch

from quire.layers.env import RowSink, StoredShape
from quire.models.checkpoint.checkpoint import Checkpoint

_WHOLE = slice(None)
_WATCHED = re.compile(r"norm|\bln_\w+\.|embed_tokens|\bwte\.|\bwpe\.|lm_head")

_CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

log = logging.getLogger("quire")


class CheckedCheckpoint(Checkpoint):
    """A wrapper around `source` that checks some tensors. `finish` logs those that are not finite, in one line.

    Checked are the tensors in which one NaN or infinity affects every request, or every request with that token.
    Checking the others would take noticeably longer.
    """

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._pending: list[tuple[str, torch.Tensor]] = []  # on a GPU: complete once the source is finished
        self._damaged: list[str] = []

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def stored(self, name: str) -> StoredShape | None:
        return self._source.stored(name)

    def packed(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        return self._source.packed(name, shape, rows, cols)

    def stream(
        self,
        sink: RowSink,
        name: str,
        shape: tuple[int, ...],
        rows: slice = _WHOLE,
        cols: slice = _WHOLE,
        *,
        multiple: int = 1,
    ) -> None:
        self._source.stream(sink, name, shape, rows, cols, multiple=multiple)

    def when_loaded(self, action: Callable[[], None]) -> None:
        self._source.when_loaded(action)

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        part = self._source.tensor(name, shape, rows, cols)
        self._check(name, part)
        return part

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
            self._pending.append((name, destination))

    def finish(self) -> None:
        self._source.finish()
        for name, values in self._pending:
            self._check(name, values)
        self._pending.clear()
        if self._damaged:
            more = f" and {len(self._damaged) - 3} more" if len(self._damaged) > 3 else ""
            log.warning(
                "%s%s: not finite in the model's dtype (NaN or infinity); requests that use such a value will fail",
                ", ".join(self._damaged[:3]),
                more,
            )

    def close(self) -> None:
        self._pending.clear()
        self._source.close()

    def _check(self, name: str, values: torch.Tensor) -> None:
        # A sum is the fastest test. It may overflow, so a sum that is not finite decides nothing.
        if not _WATCHED.search(name) or values.dtype not in _CHECKED or bool(values.sum().isfinite()):
            return
        if not bool(values.isfinite().all()) and name not in self._damaged:
            self._damaged.append(name)
