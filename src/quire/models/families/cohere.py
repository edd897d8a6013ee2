"""Command R and R+."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(
        name,
        "cohere",
        keys,
        eps=1e-5,
        eps_key="layer_norm_eps",
        tie=True,
        rope=RopeDefaults(theta=5e5, interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        layout="parallel",
        norm="unbiased_layer",
        qk_norm=keys.flag("use_qk_norm"),
        qk_norm_kind="layer",
        logit_scale=keys.number("logit_scale", default=0.0625),
    )


FAMILY = Family(
    title="Command R, R+, Aya",
    architectures=names("Cohere", "cohere"),
    parse=_parse,
    special="one norm for attention and MLP, interleaved rotation, scaled logits",
    gguf=("command-r",),
    tools="cohere_plus",
)
