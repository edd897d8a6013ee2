"""Arcee AFM."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(
        name,
        "arcee",
        keys,
        eps=1e-5,
        activation=keys.text("hidden_act", default="relu2"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        mlp="plain",
    )


FAMILY = Family(
    title="Arcee AFM",
    architectures=names("Arcee", "arcee"),
    parse=_parse,
    special="squared ReLU in an MLP without gate",
    gguf=("arcee",),
)
