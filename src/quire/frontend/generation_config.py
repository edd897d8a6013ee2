"""Read a model folder's settings for generation (`generation_config.json`) and pooling (`1_Pooling/config.json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.files.reading import read_json, shown
from quire.types import ModelError, Pooling, RequestError, SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def load_generation_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults in a model's `generation_config.json`, by SamplingParams name.

    `do_sample: false` is not read as temperature 0, because many published configs leave it at its default by
    accident.

    Args:
        folder: the model folder. A .gguf file has no such defaults, so the result is empty.

    Raises:
        ModelError: if a value is out of the range of its SamplingParams field.
    """
    if not folder.is_dir():
        return {}
    file = folder / "generation_config.json"
    config = read_json(file, optional=True)
    defaults = {ours: config[theirs] for theirs, ours in _NAMES.items() if config.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(f"{file}: {error}") from None
    return defaults


def load_eos_ids(folder: Path) -> list[int]:
    """Return the end-of-sequence ids in `generation_config.json`, or those in `config.json` if it has none.

    Raises:
        ModelError: if `eos_token_id` is not a token id or a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        eos = read_json(folder / name, optional=True).get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < 1 << 31 for i in ids):
                raise ModelError(
                    f"eos_token_id in {folder / name} must be a token id or a list of token ids, got {shown(eos)}"
                )
            return ids
    return []


def default_pooling(folder: Path) -> Pooling:
    """Return the pooling that `1_Pooling/config.json` (sentence-transformers) names, or "mean" without that file."""
    config = read_json(folder / "1_Pooling" / "config.json", optional=True) if folder.is_dir() else {}
    last = config.get("pooling_mode_lasttoken") or config.get("pooling_mode") == "lasttoken"
    return "last" if last else "mean"
