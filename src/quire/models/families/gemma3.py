"""Gemma 3, text part (arXiv:2503.19786)."""

from __future__ import annotations

import math

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, refuse_bidirectional, text_part
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = text_part(keys)
    refuse_bidirectional(name, keys)
    bias = keys.flag("attention_bias")
    defaults = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
    alias = {"sliding_window": "sliding_window_size", "max_position_embeddings": "context_window_size"}
    for key, value in defaults.items():
        if keys.get(key, alias.get(key, key), default=None) is None:
            keys.config = {**keys.config, key: value}
    every = keys.integer("sliding_window_pattern", "_sliding_window_pattern")
    soft_capped = keys.get("final_logit_softcapping", default=None) is not None
    layers = keys.integer("num_hidden_layers")
    pattern = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    return decoder_spec(
        name,
        "gemma3",
        keys,
        window=keys.integer("sliding_window", "sliding_window_size"),
        pattern=pattern,
        rope=RopeDefaults(local_theta=10000.0),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        query_scale=keys.number("query_pre_attn_scalar", default=256) ** -0.5,
        layout="sandwich",
        norm="offset_rms",
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        rounds_embedding_scale=True,
        activation=keys.text("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        tie=True,
        # The config's attn_logit_softcapping is ignored, as in transformers.
        final_soft_cap=keys.number("final_logit_softcapping") if soft_capped else None,
    )


FAMILY = Family(
    title="Gemma 3 (text)",
    architectures=(
        "Gemma3ForCausalLM",
        "Gemma3TextModel",
        "gemma3_text",
        "Gemma3ForConditionalGeneration",
        "Gemma3Model",
        "gemma3",
    ),
    parse=_parse,
    special="Gemma 2 without caps; five of six layers with a window and a smaller rotary base, norms of q and k heads",
    gguf=("gemma3",),
)
