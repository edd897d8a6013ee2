"""Llama 4 Scout and Maverick, text part."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, layer_flags, routing, text_part
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec, QueryGrowth


def _sparse(keys: ConfigKeys, layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it has experts."""
    every = keys.integer("interleave_moe_layer_step", default=1)
    listed = keys.entries("moe_layers", int)
    if listed is None:
        return tuple((i + 1) % every == 0 for i in range(layers))
    return tuple(i in set(listed) for i in range(layers))


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = text_part(keys)
    layers, width = keys.integer("num_hidden_layers"), keys.integer("intermediate_size", default=8192)
    every = keys.integer("no_rope_layer_interval", default=4)
    # The list no_rope_layers holds a 1 for each layer *with* rotation.
    listed = layer_flags(keys, "no_rope_layers") if keys.get("no_rope_layers", default=None) else None
    rotates = listed or tuple((i + 1) % every != 0 for i in range(layers))
    chunk = keys.get("attention_chunk_size", default=8192)
    whole = chunk is None or (
        keys.has("attention_chunk_size") and keys.config["attention_chunk_size"] is None
    )
    kinds = keys.entries("layer_types", str) or [
        "chunked_attention" if turns else "full_attention" for turns in rotates
    ]
    kinds = [{"chunked_attention": "sliding_attention"}.get(kind, kind) for kind in kinds]
    growth = QueryGrowth(
        beta=keys.number("attn_scale", default=0.1),
        length=keys.integer("floor_scale", default=8192),
        offset=1,
        only_unrotated=True,
    )
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_local_experts", default=16),
            keys.integer("num_experts_per_tok", default=1),
            scores="sigmoid",
        ),
        intermediate_size=width,
        sparse=_sparse(keys, layers),
        shared_size=width,
    )
    dense = keys.integer("intermediate_size_mlp", default=16384)
    bias = keys.flag("attention_bias")
    return decoder_spec(
        name,
        "llama4",
        ConfigKeys({**keys.config, "intermediate_size": dense, "layer_types": kinds}, keys.where),
        window=None if whole else keys.integer("attention_chunk_size", default=8192),
        default_dim=128,
        kv_default=8,
        eps=1e-5,
        rope=RopeDefaults(theta=500000.0, interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        chunked_windows=True,
        rotates=rotates,
        qk_norm=keys.flag("use_qk_norm", default=True),
        qk_norm_kind="unit",
        query_growth=growth if keys.flag("attn_temperature_tuning", default=True) else None,
        names={"mlp": "feed_forward"},
        moe=moe,
    )


FAMILY = Family(
    title="Llama 4 (text)",
    architectures=(
        *names("Llama4", "llama4_text"),
        "Llama4TextModel",
        "Llama4ForConditionalGeneration",
        "llama4",
    ),
    parse=_parse,
    special="attention within chunks; every fourth layer without rotation, with growing queries; experts weigh inputs",
    gguf=("llama4",),
    tools="pythonic",
)
