"""Command R7B, Command A (arXiv:2504.00698)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias, layers = keys.flag("attention_bias"), keys.integer("num_hidden_layers")
    every = keys.integer("sliding_window_pattern", default=4)
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    kinds = keys.entries("layer_types", str) or kinds
    return decoder_spec(
        name,
        "cohere2",
        keys,
        window=keys.integer("sliding_window", default=4096),
        pattern=kinds,
        eps=1e-5,
        eps_key="layer_norm_eps",
        tie=True,
        rope=RopeDefaults(interleaved=True),
        rotates=tuple(kind == "sliding_attention" for kind in kinds),
        qkv_bias=bias,
        o_bias=bias,
        layout="parallel",
        norm="unbiased_layer",
        logit_scale=keys.number("logit_scale", default=0.0625),
    )


FAMILY = Family(
    title="Command R7B, Command A",
    architectures=names("Cohere2", "cohere2"),
    parse=_parse,
    special="Command R with windows; layers without a window do not rotate",
    gguf=("cohere2",),
    tools="cohere",
    reasoning="cohere",
)
