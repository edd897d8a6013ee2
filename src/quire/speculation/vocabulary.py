"""The check that a draft model has the vocabulary of the model that verifies its drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.types import ConfigError


def check_vocabulary(target: Path, target_size: int, draft: Path, draft_size: int) -> None:
    """Raise ConfigError unless equal token ids mean equal texts in both models.

    The tokens of the two `tokenizer.json` are compared. The sizes may differ, because models pad their vocabularies.
    Without two such files, the sizes must be equal.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    if ours is None or theirs is None:
        if target_size != draft_size:
            raise ConfigError(
                f"spec_model has a vocabulary of {draft_size} tokens, but the model has {target_size}; a draft model "
                "must have the tokenizer of the model"
            )
        return
    if ours == theirs:
        return
    token = next(token for token in ours | theirs if ours.get(token) != theirs.get(token))
    raise ConfigError(
        f"spec_model has another tokenizer than the model: token {token!r} is {theirs.get(token, 'missing')} there "
        f"and {ours.get(token, 'missing')} here; choose a draft model of the same family"
    )


def _tokens(folder: Path) -> dict[str, int] | None:
    """Return the ids of all tokens in `tokenizer.json`, or None without such a file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    model = found.get("model", {}).get("vocab", {})
    vocab = model if isinstance(model, dict) else {piece: i for i, (piece, _) in enumerate(model)}
    return {**vocab, **{token["content"]: token["id"] for token in found.get("added_tokens", [])}}
