"""Gemma 4, text part."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.files.reading import shown
from quire.layers.rope_params import RopeParams
from quire.models.config.gemma import kv_sources, layer_kinds, layer_rope, with_defaults
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing, soft_cap, text_part
from quire.models.families import Family, names
from quire.models.gemma_spec import GemmaSpec
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError

_DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0, "global_head_dim": 512,
}  # fmt: skip
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def _rope(keys: ConfigKeys, dim: int) -> RopeParams:
    """Parse the rotary parameters of one kind of layers: `proportional` rotates the first pairs of whole heads."""
    theta = keys.number("rope_theta", default=1e4)
    if (kind := keys.text("rope_type", default="default")) == "default":
        return RopeParams(theta=theta)
    if kind != "proportional":
        raise ModelError(f"Gemma 4 with rope type {shown(kind)} is not supported")
    factor = keys.number("factor", default=1.0)
    turned = int(keys.number("partial_rotary_factor", default=1.0) * dim // 2)
    divisors = (factor,) * turned + (math.inf,) * (dim // 2 - turned)
    return RopeParams(theta=theta, kind="divisors", divisors=divisors)


def _head_sizes(keys: ConfigKeys, is_full: list[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the head size and the number of KV heads of each layer.

    Newer configs list them by layer, in `per_layer_config`.
    """
    dim, count = keys.integer("head_dim"), keys.integer("num_key_value_heads")
    listed = keys.section("per_layer_config")
    full = {"head_dim": keys.integer("global_head_dim"), "num_key_value_heads": count}
    if keys.flag("attention_k_eq_v"):
        full["num_key_value_heads"] = keys.integer("num_global_key_value_heads", default=count)
    own = [
        listed.get(str(i), {}) if listed else full if is_global else {} for i, is_global in enumerate(is_full)
    ]
    layers = [ConfigKeys({"head_dim": dim, "num_key_value_heads": count, **each}, keys.where) for each in own]
    dims = tuple(layer.integer("head_dim") for layer in layers)
    return dims, tuple(layer.integer("num_key_value_heads") for layer in layers)


def _experts(keys: ConfigKeys, layers: int) -> MoESpec | None:
    if not keys.flag("enable_moe_block"):
        return None
    rule = routing(keys, keys.integer("num_experts"), keys.integer("top_k_experts"), renormalise=True)
    return MoESpec(
        routing=rule,
        intermediate_size=keys.integer("moe_intermediate_size"),
        sparse=(True,) * layers,
        shared_size=keys.integer("intermediate_size"),  # the MLP beside the experts
    )


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = with_defaults(text_part(keys), _DEFAULTS)
    if keys.get("use_bidirectional_attention", default=None) not in (None, False, "vision"):
        raise ModelError(f"{name} with use_bidirectional_attention is not supported")
    kinds, heads = layer_kinds(keys, 6), keys.integer("num_attention_heads")
    kinds[-1] = "full_attention"
    sources, width = kv_sources(keys, kinds), keys.integer("intermediate_size")
    wide = 2 * width if keys.flag("use_double_wide_mlp") else width
    is_full = [kind == "full_attention" for kind in kinds]
    equal = keys.flag("attention_k_eq_v")
    dims, kv_heads = _head_sizes(keys, is_full)
    if any(heads % count for count in kv_heads):
        raise keys.refuse("num_global_key_value_heads", f"a divisor of num_attention_heads {heads}", kv_heads)
    layer_width = keys.integer("hidden_size_per_layer_input", default=256, minimum=0)
    bias = keys.flag("attention_bias")
    spec = decoder_spec(
        name,
        "gemma4",
        ConfigKeys({**keys.config, "rope_parameters": {}, "layer_types": kinds}, keys.where),
        window=keys.integer("sliding_window"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        query_scale=1.0,
        layout="sandwich",
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        rounds_embedding_scale=True,
        activation=keys.text("hidden_activation", default="gelu_pytorch_tanh"),
        tie=True,
        final_soft_cap=soft_cap(keys, "final_logit_softcapping"),
        head_dims=dims,
        kv_heads=kv_heads,
        kv_sources=sources,
        mlp_sizes=tuple(width if source == i else wide for i, source in enumerate(sources)),
        gemma=GemmaSpec(
            layer_width=layer_width,
            layer_vocab=keys.integer("vocab_size_per_layer_input"),
            keys_as_values=tuple(i for i, full in enumerate(is_full) if full and equal),
        ),
        moe=_experts(keys, len(kinds)),
    )
    full_rope = _rope(layer_rope(keys, "full_attention", _FULL_ROPE), dims[-1])
    local_rope = _rope(layer_rope(keys, "sliding_attention", {}), keys.integer("head_dim"))
    return replace(spec, rope=full_rope, local_rope=local_rope)


FAMILY = Family(
    title="Gemma 4 (text)",
    architectures=(
        *names("Gemma4", "gemma4_text"),
        "Gemma4TextModel",
        "Gemma4ForConditionalGeneration",
        "gemma4",
    ),
    parse=_parse,
    special="two head sizes, layers that share keys and values, an embedding per layer, experts beside the MLP",
    gguf=("gemma4",),
    tools="gemma",
    reasoning="gemma",
    heads=(),
)
