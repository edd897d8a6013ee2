"""What a `tokenizer.json` may hold, checked before the `tokenizers` library builds anything from it.

The library takes seconds for a million tokens, and runs each step of a pipeline for every text.
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
_MAX_STEPS = 1000  # objects in the description of one stage
_MAX_DEPTH = 16
_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

_Raw = msgspec.Raw
_EMPTY = msgspec.Raw(b"null")


class _TokenizerModel(msgspec.Struct):
    vocab: _Raw = _EMPTY
    merges: _Raw = _EMPTY


class _File(msgspec.Struct):
    model: _TokenizerModel = msgspec.field(default_factory=_TokenizerModel)
    added_tokens: _Raw = _EMPTY
    normalizer: _Raw = _EMPTY
    pre_tokenizer: _Raw = _EMPTY
    post_processor: _Raw = _EMPTY
    decoder: _Raw = _EMPTY


def read_tokenizer_json(path: Path) -> str:
    """The text of a tokenizer.json whose parts are of a size that is worth loading. Raises ModelError."""
    text = read_text(path, MAX_VOCABULARY_BYTES)
    try:
        file = msgspec.json.decode(text, type=_File)
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


def check_count(path: Path | str, what: str, count: int, most: int) -> None:
    if count > most:
        raise ModelError(f"{path} has {count} {what}, but at most {most} are read")


def _count(raw: msgspec.Raw, most: int, each: int) -> int:
    """Entries of a JSON object or list; with more than `most` * `each` commas, about so many.

    Commas tell it without decoding where there are so few, or so many, that what they separate does not matter.
    """
    commas = bytes(raw).count(b",")
    if commas < most:
        return 0
    if commas > each * most:
        return commas
    found = msgspec.json.decode(raw)
    return len(found) if isinstance(found, (dict, list)) else 0


def _check_stage(path: Path, stage: str, found: Any) -> None:
    """Walk level by level, so that depth costs no recursion."""
    level, total = [found] if isinstance(found, (dict, list)) else [], 0
    for _ in range(_MAX_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        total += len(level)
        check_count(path, f"objects in its {stage}", total, _MAX_STEPS)
        if not level:
            return
    raise ModelError(f"{path}: {stage} is nested too deeply: at most {_MAX_DEPTH} levels are read")
