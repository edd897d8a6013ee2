"""`load_spec`: the `ModelSpec` of a folder (config.json, generation_config.json) or a .gguf file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.models.spec import ModelSpec
from quire.types import ModelError


def load_spec(path: str | Path) -> ModelSpec:
    """The spec of the model at `path`. End-of-sequence ids of generation_config.json come first."""
    path = Path(path)
    if path.suffix == ".gguf":
        from quire.models.gguf_spec import gguf_spec  # here: most runs need no GGUF reader

        return gguf_spec(path)
    if not path.is_dir():
        raise ModelError(f"{path} is no folder and no .gguf file")
    if not (path / "config.json").exists():
        raise ModelError(f"{path} holds no config.json")
    spec = ModelSpec.from_config(read_json(path / "config.json"))
    if (path / "generation_config.json").exists():
        eos = read_json(path / "generation_config.json").get("eos_token_id")
        first = eos if isinstance(eos, list) else [] if eos is None else [eos]
        spec = replace(spec, eos_token_ids=tuple(dict.fromkeys([*first, *spec.eos_token_ids])))
    # NVIDIA's exporter describes packed weights in a file of their own
    if (path / "hf_quant_config.json").exists() and spec.quantization is None:
        found = read_json(path / "hf_quant_config.json").get("quantization") or {}
        spec = replace(spec, quantization=f"quant_algo {found.get('quant_algo', 'unknown')}")
    return spec


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; ModelError names the file if it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value
