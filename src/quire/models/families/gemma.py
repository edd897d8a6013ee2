"""Gemma (arXiv:2403.08295)."""

from __future__ import annotations

import math

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, refuse_bidirectional
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    refuse_bidirectional(name, keys)
    bias = keys.flag("attention_bias")
    activation = keys.text("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    return decoder_spec(
        name,
        "gemma",
        keys,
        default_dim=256,
        kv_default=16,
        tie=True,
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,  # old configs mean the tanh
        qkv_bias=bias,
        o_bias=bias,
        norm="offset_rms",
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        rounds_embedding_scale=True,
    )


FAMILY = Family(
    title="Gemma",
    architectures=names("Gemma", "gemma"),
    parse=_parse,
    special="scaled embeddings, norm weights stored minus one",
    gguf=("gemma",),
)
