"""EXAONE 4 (arXiv:2507.11407)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    layers = keys.integer("num_hidden_layers")
    off = keys.has("sliding_window") and keys.get("sliding_window", default=None) is None
    window = None if off else optional_window(keys, 4096)
    every = keys.integer("sliding_window_pattern", default=4) if not keys.has("layer_types") else 4
    kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    kinds = keys.entries("layer_types", str) or kinds
    return decoder_spec(
        name,
        "exaone4",
        keys,
        window=window,
        pattern=kinds,
        eps=1e-5,
        rotates=tuple(window is None or kind == "sliding_attention" for kind in kinds),
        layout="post",
        qk_norm=True,
    )


FAMILY = Family(
    title="EXAONE 4",
    architectures=names("Exaone4", "exaone4"),
    parse=_parse,
    special="norms after each half; windows in three of four layers, the others without rotation",
    gguf=("exaone4",),
    tools="hermes",
    reasoning="think",
)
