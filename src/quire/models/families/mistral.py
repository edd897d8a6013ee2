"""Mistral 7B (arXiv:2310.06825), Mistral Nemo and Small."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window, refuse_bias
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    refuse_bias(name, keys)
    # null turns the window off; a missing field means the default of transformers.
    default = None if keys.has("sliding_window", "sliding_window_size") else 4096
    return decoder_spec(name, "llama", keys, window=optional_window(keys, default), kv_default=8)


FAMILY = Family(
    title="Mistral 7B, Nemo, Small",
    architectures=names("Mistral", "mistral"),
    parse=_parse,
    special="windows in the first version; GGUF files are of architecture llama",
    tools="mistral",
    reasoning="mistral",
)
