"""Check of GGUF files without one of their parts: `check_without_parts`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from whole import load_model

from quire.models.checkpoint import gguf as gguf_checkpoint
from quire.models.config import gguf as gguf_config
from quire.types import ModelError

# Without these a file is that of another valid model: with a tied head, or without scaled positions or layers.
OPTIONAL = (".bias", "output.weight", "rope_f", "layer_output_scale")


REQUIRED = (
    ".architecture", ".block_count", ".embedding_length", ".context_length", ".attention.head_count",
    ".expert_used_count",
)  # fmt: skip


class PartialReader:
    """A reader of a file that hides one key or one tensor, and lists the keys that were read."""

    byte_order = "I"

    def __init__(self, reader: gguf.GGUFReader, hidden: str = "") -> None:
        self._reader, self._hidden = reader, hidden
        self.tensors = [tensor for tensor in reader.tensors if tensor.name != hidden]
        self.read: set[str] = set()

    def get_field(self, key: str) -> Any:
        found = None if key == self._hidden else self._reader.get_field(key)
        if found is not None:
            self.read.add(key)
        return found


def check_without_parts(path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int = 2) -> None:
    """Check a file without each key that is read, and without some tensors.

    A key may have a default. Otherwise the error is one sentence, which names it if no model can do without.

    Args:
        path: a file that loads.
        monkeypatch: replaces the function that opens files.
        tensors: number of tensors to try, chosen by the file's contents.
    """
    whole = gguf.GGUFReader(path)
    reader = PartialReader(whole)

    def hide(part: str) -> PartialReader:
        partial = PartialReader(whole, part)
        for module in (gguf_config, gguf_checkpoint):
            monkeypatch.setattr(module, "open_gguf", lambda path: partial)
        return partial

    reader = hide("")
    gguf_config.gguf_spec(path)
    named = set()
    for key in sorted(reader.read):
        hide(key)
        try:
            gguf_config.gguf_spec(path)
        except ModelError as error:
            assert len(str(error)) < 600 and "\n" not in str(error) and "config.json" not in str(error)
            if key.rpartition(".")[2] in str(error):
                named.add(key)
    assert {key for key in reader.read if key.endswith(REQUIRED) or ".ssm." in key} <= named
    names = sorted(tensor.name for tensor in whole.tensors)
    for name in random.Random(len(names)).sample(names, tensors):
        hide(name)
        try:
            load_model(path)
            assert any(part in name for part in OPTIONAL), name
        except ModelError as error:
            assert len(str(error)) < 600 and "\n" not in str(error)
    monkeypatch.undo()
