"""Check of GGUF files without one of their parts: `check_without_parts`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from whole import load_model

from quire.models.checkpoint import gguf as gguf_checkpoint
from quire.models.config import gguf as gguf_config
from quire.models.config.gguf_file import GGUFFile, open_gguf
from quire.types import ModelError

# Without these a file is that of another valid model: with a tied head, or without scaled positions or layers.
OPTIONAL = (".bias", "output.weight", "rope_f", "layer_output_scale")


REQUIRED = (
    ".architecture", ".block_count", ".embedding_length", ".context_length", ".attention.head_count",
    ".expert_used_count",
)  # fmt: skip


class WatchedMetadata(dict[str, Any]):
    """Metadata that lists the keys that were read and present."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        if key in self:
            self.read.add(key)
        return super().get(key, default)


def check_without_parts(path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int = 2) -> None:
    """Check a file without each key that is read, and without some tensors.

    A key may have a default. Otherwise the error is one sentence, which names it if no model can do without.

    Args:
        path: a file that loads.
        monkeypatch: replaces the function that opens files.
        tensors: number of tensors to try, chosen by the file's contents.
    """
    whole = open_gguf(path)

    def hide(part: str) -> set[str]:
        """Hide a key or a tensor, and return the set that collects the keys that are read."""
        metadata = WatchedMetadata({key: value for key, value in whole.metadata.items() if key != part})
        partial = GGUFFile(metadata, [tensor for tensor in whole.tensors if tensor.name != part])
        for module in (gguf_config, gguf_checkpoint):
            monkeypatch.setattr(module, "open_gguf", lambda path: partial)
        return metadata.read

    read = hide("")
    gguf_config.gguf_spec(path)
    named = set()
    for key in sorted(set(read)):
        hide(key)
        try:
            gguf_config.gguf_spec(path)
        except ModelError as error:
            assert len(str(error)) < 600 and "\n" not in str(error) and "config.json" not in str(error)
            if key.rpartition(".")[2] in str(error):
                named.add(key)
    assert {key for key in read if key.endswith(REQUIRED) or ".ssm." in key} <= named
    names = sorted(tensor.name for tensor in whole.tensors)
    for name in random.Random(len(names)).sample(names, tensors):
        hide(name)
        try:
            load_model(path)
            assert any(part in name for part in OPTIONAL), name
        except ModelError as error:
            assert len(str(error)) < 600 and "\n" not in str(error)
    monkeypatch.undo()
