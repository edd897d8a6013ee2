"""Kimi Linear (arXiv:2510.26692): Kimi delta attention, latent attention without rotation, sigmoid routing."""

from __future__ import annotations

from dataclasses import replace

from quire.layers.mixer_params import DeltaParams
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.families import Family, names
from quire.models.spec import LatentSpec, ModelSpec, MoESpec
from quire.types import ModelError


def _mixes(keys: ConfigKeys, linear: ConfigKeys) -> tuple[bool, ...]:
    """Return, for each layer, whether it is Kimi delta attention."""
    layers = keys.integer("num_hidden_layers")
    kinds = keys.entries("layer_types", str)
    if kinds is None and linear.has("full_attn_layers"):  # counted from 1
        full = set(linear.entries("full_attn_layers", int) or [])
        return tuple(i + 1 not in full for i in range(layers))
    kinds = kinds or ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise keys.refuse(
            "layer_types", f"linear_attention or full_attention for each of {layers} layers", kinds
        )
    return tuple(kind == "linear_attention" for kind in kinds)


def _experts(keys: ConfigKeys) -> MoESpec:
    layers = keys.integer("num_hidden_layers")
    dense = keys.integer("first_k_dense_replace", default=1, minimum=0)
    kinds = keys.entries("mlp_layer_types", str)
    kinds = kinds or ["sparse" if i >= dense else "dense" for i in range(layers)]
    width = keys.integer("moe_intermediate_size", default=1024)
    return MoESpec(
        routing=routing(
            keys,
            keys.integer("num_experts", "num_local_experts", default=256),
            keys.integer("num_experts_per_token", "num_experts_per_tok", default=8),
            keys.integer("num_expert_group", "n_group", default=1),
            keys.integer("topk_group", default=1),
            scores="sigmoid",
            correction=True,
            group_score="two_largest",
            renormalise=keys.flag("moe_renormalize", "norm_topk_prob", default=True),
            scale=keys.number("routed_scaling_factor", default=2.446),
        ),
        intermediate_size=width,
        sparse=tuple(kind == "sparse" for kind in kinds),
        shared_size=width * keys.integer("num_shared_experts", "n_shared_experts", default=1),
    )


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if keys.flag("attention_bias") or not keys.flag("mla_use_nope", default=True):
        raise ModelError(f"{name} with attention_bias, or with rotation, is not supported")
    linear = ConfigKeys(keys.section("linear_attn_config"), keys.where)
    both = ConfigKeys({**keys.config, **linear.config}, keys.where)
    mixes, dim = (
        _mixes(keys, linear),
        both.integer("head_dim" if linear.config else "linear_head_dim", default=128),
    )
    heads = both.integer("num_heads" if linear.config else "linear_num_heads", default=32)
    mixer = DeltaParams(
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        width=both.integer("short_conv_kernel_size", "linear_conv_kernel_dim", default=4, minimum=2),
        stored="kimi",
    )
    latent = LatentSpec(
        query_rank=None if keys.get("q_lora_rank", default=None) is None else keys.integer("q_lora_rank"),
        rank=keys.integer("kv_lora_rank", default=512),
        content_dim=keys.integer("qk_nope_head_dim", default=128),
        rotary_dim=keys.integer("qk_rope_head_dim", default=64),
        value_dim=keys.integer("v_head_dim", default=128),
    )
    heads, length = keys.integer("num_attention_heads"), keys.integer(
        "model_max_length", "max_position_embeddings", default=1 << 20
    )  # fmt: skip
    facts = {
        "head_dim": latent.content_dim + latent.rotary_dim, "num_key_value_heads": heads,
        "max_position_embeddings": length,
    }  # fmt: skip
    keys = ConfigKeys({**keys.config, **facts}, keys.where)
    spec = decoder_spec(
        name,
        "hybrid",
        keys.without("layer_types"),
        eps=1e-5,
        rotates=(False,) * len(mixes),
        mixer=mixer,
        mixes=mixes,
        attends=tuple(not each for each in mixes),
        moe=_experts(keys),
        names={"mixer": "self_attn"},
    )
    return replace(spec, latent=latent)


FAMILY = Family(
    title="Kimi Linear",
    architectures=names("KimiLinear", "kimi_linear"),
    parse=_parse,
    special="Kimi delta attention in three of four layers, latent attention without rotation, sigmoid routing",
    gguf=("kimi-linear",),
    tools="kimi_k2",
)
