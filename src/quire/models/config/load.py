"""`load_spec`: the `ModelSpec` of a folder (config.json, generation_config.json) or a .gguf file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.files.reading import read_json
from quire.models.config.keys import ConfigKeys, token_ids
from quire.models.config.quantization import parse_quantization
from quire.models.spec import ModelSpec
from quire.types import ModelError


def load_spec(path: str | Path) -> ModelSpec:
    """Read the spec of the model at `path`, a folder or a .gguf file.

    The end-of-sequence ids of generation_config.json come before those of config.json.

    Raises:
        ModelError: if a file is missing or damaged, or the model is not supported.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from quire.models.config.gguf import gguf_spec  # deferred: most runs need no GGUF reader

        return gguf_spec(path)
    if not path.is_dir():
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    if not (path / "config.json").exists():
        raise ModelError(f"{path} holds no config.json")
    spec = ModelSpec.from_config(read_json(path / "config.json"))
    if (generation := path / "generation_config.json").exists():
        first = token_ids(
            read_json(generation).get("eos_token_id"), "eos_token_id", spec.vocab_size, str(generation)
        )
        spec = replace(spec, eos_token_ids=tuple(dict.fromkeys([*first, *spec.eos_token_ids])))
    # NVIDIA's exporter describes packed weights in a separate file.
    if (path / "hf_quant_config.json").exists() and spec.quantization is None:
        keys = ConfigKeys(read_json(path / "hf_quant_config.json"), "hf_quant_config.json")
        spec = replace(spec, quantization=parse_quantization(keys.section("quantization"), keys.where))
    return spec
