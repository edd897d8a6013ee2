"""SmolLM3."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, layer_flags, optional_window
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias, layers = keys.flag("attention_bias"), keys.integer("num_hidden_layers")
    every = keys.integer("no_rope_layer_interval", default=4)
    # The list no_rope_layers holds a 1 for each layer *with* rotation.
    rotates = layer_flags(keys, "no_rope_layers") or tuple((i + 1) % every != 0 for i in range(layers))
    return decoder_spec(
        name,
        "smollm3",
        keys,
        window=optional_window(keys) if keys.flag("use_sliding_window") else None,
        pattern=["full_attention" if turns else "sliding_attention" for turns in rotates],
        kv_default=4,
        theta=2e6,
        tie=True,
        rotates=rotates,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
    )


FAMILY = Family(
    title="SmolLM3",
    architectures=names("SmolLM3", "smollm3"),
    parse=_parse,
    special="every fourth layer without rotation",
    gguf=("smollm3",),
    tools="hermes",
    reasoning="think",
)
