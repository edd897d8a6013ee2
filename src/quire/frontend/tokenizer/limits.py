"""Limits on the contents of a `tokenizer.json`, checked before the `tokenizers` library loads it.

The library takes seconds to load a million tokens, and runs each step of a pipeline for every text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.files.reading import MAX_VOCABULARY_BYTES, read_text
from quire.types import ModelError

MAX_TOKENS = 1 << 19  # twice the largest published vocabulary
MAX_ADDED = 1 << 15
_MAX_MERGES = 4 * MAX_TOKENS
_MAX_STEPS = 1000  # objects and lists in the description of one stage
_MAX_DEPTH = 16
_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

_Raw = msgspec.Raw
_EMPTY = msgspec.Raw(b"null")


class _TokenizerModel(msgspec.Struct):
    """The `model` of a tokenizer.json, undecoded."""

    vocab: _Raw = _EMPTY
    merges: _Raw = _EMPTY


class _TokenizerFile(msgspec.Struct):
    """The fields of a tokenizer.json that are checked, undecoded."""

    model: _TokenizerModel = msgspec.field(default_factory=_TokenizerModel)
    added_tokens: _Raw = _EMPTY
    normalizer: _Raw = _EMPTY
    pre_tokenizer: _Raw = _EMPTY
    post_processor: _Raw = _EMPTY
    decoder: _Raw = _EMPTY


def read_tokenizer_json(path: Path) -> str:
    """Return the text of a tokenizer.json. Raise ModelError if it is malformed or exceeds a limit."""
    text = read_text(path, MAX_VOCABULARY_BYTES)
    try:
        file = msgspec.json.decode(text, type=_TokenizerFile)
        check_count(path, "tokens in its vocabulary", _count(file.model.vocab, MAX_TOKENS, 4), MAX_TOKENS)
        check_count(path, "merges", _count(file.model.merges, _MAX_MERGES, 4), _MAX_MERGES)
        check_count(path, "added tokens", _count(file.added_tokens, MAX_ADDED, 20), MAX_ADDED)
        for stage in _STAGES:
            _check_stage(path, stage, msgspec.json.decode(getattr(file, stage)))
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply: at most {_MAX_DEPTH} levels are read") from None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error
    return text


def check_count(path: Path | str, name: str, count: int, limit: int) -> None:
    """Raise ModelError if the file at `path` has more than `limit` of the things called `name`."""
    if count > limit:
        raise ModelError(f"{path} has {count} {name}, but at most {limit} are read")


def _count(raw: msgspec.Raw, limit: int, max_commas: int) -> int:
    """Return the number of entries of a JSON object or list, to compare with `limit`.

    Counting commas avoids decoding: with fewer than `limit` of them the result is 0, and with more than `limit` times
    `max_commas`, the most that an entry has, it is their number.
    """
    commas = bytes(raw).count(b",")
    if commas < limit:
        return 0
    if commas > max_commas * limit:
        return commas
    entries = msgspec.json.decode(raw)
    return len(entries) if isinstance(entries, (dict, list)) else 0


def _check_stage(path: Path, stage: str, description: Any) -> None:
    """Check the size and depth of a stage, level by level to avoid recursion."""
    level, total = [description] if isinstance(description, (dict, list)) else [], 0
    for _ in range(_MAX_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        total += len(level)
        check_count(path, f"objects in its {stage}", total, _MAX_STEPS)
        if not level:
            return
    raise ModelError(f"{path}: {stage} is nested too deeply: at most {_MAX_DEPTH} levels are read")
