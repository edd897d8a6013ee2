"""What a model folder says about generation: `generation_config.json`, in the words of SamplingParams; and about
pooling."""

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
    """The model's own sampling defaults by SamplingParams name; empty for a model that has none. Raises ModelError
    for values that no request could be served with.

    `do_sample: false` is not read as temperature 0: published configs leave it at its default by accident.
    """
    if not folder.is_dir():
        return {}
    file = folder / "generation_config.json"
    config = read_json(file, optional=True)
    found = {ours: config[theirs] for theirs, ours in _NAMES.items() if config.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{file}: {error}") from None
    return found


def load_eos_ids(folder: Path) -> list[int]:
    """End-of-sequence ids: of `generation_config.json`, or where it has none of `config.json`."""
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
    """As `1_Pooling/config.json` of sentence-transformers says; the mean, where there is none."""
    config = read_json(folder / "1_Pooling" / "config.json", optional=True) if folder.is_dir() else {}
    last = config.get("pooling_mode_lasttoken") or config.get("pooling_mode") == "lasttoken"
    return "last" if last else "mean"
