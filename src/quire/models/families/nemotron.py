"""Nemotron-4 and Minitron (arXiv:2402.16819)."""

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
        "nemotron",
        keys,
        eps=1e-5,
        eps_key="norm_eps",
        rope=RopeDefaults(partial=0.5),
        activation=keys.text("hidden_act", default="relu2"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        norm="offset_layer",
        mlp="plain",
    )


FAMILY = Family(
    title="Nemotron-4, Minitron",
    architectures=names("Nemotron", "nemotron"),
    parse=_parse,
    special="LayerNorm with weights stored minus one, squared ReLU, partial rotation",
    gguf=("nemotron",),
)
