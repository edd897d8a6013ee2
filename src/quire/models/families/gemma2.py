"""Gemma 2 (arXiv:2408.00118)."""

from __future__ import annotations

import math

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, refuse_bidirectional, soft_cap
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    refuse_bidirectional(name, keys)
    bias, layers = keys.flag("attention_bias"), keys.integer("num_hidden_layers")
    return decoder_spec(
        name,
        "gemma2",
        keys,
        window=keys.integer("sliding_window", default=4096),
        pattern=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        default_dim=256,
        kv_default=4,
        tie=True,
        activation=keys.text("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        query_scale=keys.number("query_pre_attn_scalar", default=256) ** -0.5,
        qkv_bias=bias,
        o_bias=bias,
        layout="sandwich",
        norm="offset_rms",
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        rounds_embedding_scale=True,
        attn_soft_cap=soft_cap(keys, "attn_logit_softcapping", 50.0),
        final_soft_cap=soft_cap(keys, "final_logit_softcapping", 30.0),
    )


FAMILY = Family(
    title="Gemma 2",
    architectures=names("Gemma2", "gemma2"),
    parse=_parse,
    special="soft caps, alternating windows, norms before and after each half",
    gguf=("gemma2",),
)
