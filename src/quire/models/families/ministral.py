"""Ministral 8B."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    window = optional_window(keys, None if keys.has("sliding_window") else 4096)
    return decoder_spec(name, "ministral", keys, window=window, kv_default=8)


FAMILY = Family(
    title="Ministral 8B",
    architectures=names("Ministral", "ministral"),
    parse=_parse,
    special="windows by layer",
    tools="mistral",
)
