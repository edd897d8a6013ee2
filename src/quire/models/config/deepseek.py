"""Parsers of DeepSeek's `config.json`: V2, V3 and R1, and Kimi-K2, which has the architecture of V3.

Other families with latent attention use its parts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.files.reading import shown
from quire.layers.routing_params import Routing
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.spec import IndexSpec, LatentSpec, ModelSpec, MoESpec
from quire.types import ModelError


def parse_deepseek_v2(name: str, keys: ConfigKeys) -> ModelSpec:
    """Parse a DeepSeek-V2 config: experts are chosen by a softmax, in the best groups if there are groups."""
    _require(name, keys, "scoring_func", "softmax")
    method = keys.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"{name} with topk_method {shown(method)} is not supported")
    if keys.flag("norm_topk_prob"):
        raise ModelError(f"{name} with norm_topk_prob is not supported")
    groups = _groups(keys) if method == "group_limited_greedy" else {}
    moe = parse_experts(name, keys, experts=64, first_dense=0, shared=2, width=1407, scale=1.0, **groups)
    return latent_spec(name, keys, moe, interleaved=True)


def parse_deepseek_v3(name: str, keys: ConfigKeys) -> ModelSpec:
    """Parse a config of DeepSeek-V3, R1 or Kimi-K2: experts are chosen by sigmoids with a correction."""
    return latent_spec(name, keys, sigmoid_experts(name, keys), keys.flag("rope_interleave", default=True))


def sigmoid_experts(name: str, keys: ConfigKeys) -> MoESpec | None:
    """Parse the experts of DeepSeek-V3 and later; None if all layers are dense."""
    _require(name, keys, "scoring_func", "sigmoid")
    _require(name, keys, "topk_method", "noaux_tc")
    return parse_experts(
        name,
        keys,
        experts=256,
        first_dense=3,
        shared=1,
        width=2048,
        scale=2.5,
        scores="sigmoid",
        correction=True,
        renormalise=keys.flag("norm_topk_prob", default=True),
        **_groups(keys, 8, 4),
        group_score="two_largest",
    )


def _require(name: str, keys: ConfigKeys, field: str, value: str) -> None:
    """Raise ModelError if the config has another value than the only one that this architecture has."""
    if (found := keys.text(field, default=value)) != value:
        raise ModelError(f"{name} with {field} {shown(found)} is not supported")


def parse_experts(
    name: str,
    keys: ConfigKeys,
    *,
    experts: int,
    first_dense: int,
    shared: int,
    width: int,
    scale: float,
    **rule: Any,
) -> MoESpec | None:
    """Parse the expert layers; None if all layers are dense. The numbers are defaults of transformers."""
    layers = keys.integer("num_hidden_layers")
    dense = keys.integer("first_k_dense_replace", default=first_dense, minimum=0)
    kinds = keys.entries("mlp_layer_types", str) or [
        "dense" if i < dense else "sparse" for i in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise keys.refuse("mlp_layer_types", f"a list of {layers} entries dense or sparse", kinds)
    if "sparse" not in kinds:
        return None
    if (every := keys.integer("moe_layer_freq", default=1)) != 1:
        raise ModelError(f"{name} with moe_layer_freq {every} is not supported")
    experts = keys.integer("n_routed_experts", "num_local_experts", default=experts)
    top_k = keys.integer("num_experts_per_tok", default=8)
    groups, top_groups = rule.get("groups", 1), rule.get("top_groups", 1)
    if experts % groups:
        raise keys.refuse("n_group", f"a divisor of n_routed_experts {experts}", groups)
    if top_groups > groups:
        raise keys.refuse("topk_group", f"at most n_group {groups}", top_groups)
    if top_k > (most := experts // groups * top_groups):
        raise keys.refuse("num_experts_per_tok", f"at most the {most} experts of a token's groups", top_k)
    width = keys.integer("moe_intermediate_size", default=width)
    none = keys.has("n_shared_experts") and keys.get("n_shared_experts", default=None) is None
    count = 0 if none else keys.integer("n_shared_experts", default=shared, minimum=0)
    scale = keys.number("routed_scaling_factor", default=scale)
    return MoESpec(
        routing=Routing(num_experts=experts, top_k=top_k, scale=scale, **rule),
        intermediate_size=width,
        sparse=tuple(kind == "sparse" for kind in kinds),
        shared_size=count * width,
    )


def _groups(keys: ConfigKeys, groups: int = 1, top_groups: int = 1) -> dict[str, int]:
    """Parse the groups of experts; the numbers are the defaults."""
    return {
        "groups": keys.integer("n_group", default=groups),
        "top_groups": keys.integer("topk_group", default=top_groups),
    }


def latent_spec(
    name: str,
    keys: ConfigKeys,
    moe: MoESpec | None,
    interleaved: bool,
    index: IndexSpec | None = None,
    **fields: Any,
) -> ModelSpec:
    """Build the spec of a model with latent attention; `fields` are arguments of `decoder_spec`."""
    if keys.flag("attention_bias"):
        raise ModelError(f"{name} with attention_bias is not supported")
    latent = LatentSpec(
        # null: queries are projected directly; a missing field means the default of transformers
        query_rank=None
        if keys.has("q_lora_rank") and keys.get("q_lora_rank", default=None) is None
        else keys.integer("q_lora_rank", default=1536),
        rank=keys.integer("kv_lora_rank", default=512),
        content_dim=keys.integer("qk_nope_head_dim", default=128),
        rotary_dim=keys.integer("qk_rope_head_dim", default=64),
        value_dim=keys.integer("v_head_dim", default=128),
        index=index,
    )
    if latent.rotary_dim % 2:
        raise keys.refuse("qk_rope_head_dim", "even, because pairs are rotated", latent.rotary_dim)
    if index is not None and latent.query_rank is None:
        raise ModelError(f"{name} without q_lora_rank is not supported")
    if index is not None and index.dim < latent.rotary_dim:
        raise keys.refuse("index_head_dim", f"at least qk_rope_head_dim {latent.rotary_dim}", index.dim)
    heads, head_dim = keys.integer("num_attention_heads"), latent.content_dim + latent.rotary_dim
    # head_dim and num_key_value_heads describe no tensor of these models, whatever a config says.
    keys = ConfigKeys({**keys.config, "head_dim": head_dim, "num_key_value_heads": heads}, keys.where)
    scale = head_dim**-0.5 * _score_factor(keys)
    spec = decoder_spec(name, "deepseek", keys, query_scale=scale, moe=moe, **fields)
    extra = keys.integer("num_nextn_predict_layers", default=0, minimum=0)
    assert spec.rope is not None
    rope = replace(spec.rope, interleaved=interleaved)
    return replace(spec, rope=rope, latent=latent, extra_layers=extra)


def parse_index(keys: ConfigKeys, heads: int, interleaved: bool, layers: tuple[bool, ...]) -> IndexSpec:
    """Parse the indexers of sparse attention; `heads` is the default, `layers` says which layers have one."""
    return IndexSpec(
        heads=keys.integer("index_n_heads", default=heads),
        dim=keys.integer("index_head_dim", default=128),
        top_k=keys.integer("index_topk", default=2048),
        interleaved=interleaved,
        layers=layers,
    )


def without_kinds(name: str, keys: ConfigKeys) -> ConfigKeys:
    """Return the config without `layer_types`, which must be `indexed_attention` for all layers.

    Raises:
        ModelError: if a layer has another kind of attention.
    """
    kinds = set(keys.entries("layer_types", str) or []) - {"indexed_attention", "deepseek_sparse_attention"}
    if kinds:
        raise ModelError(f"{name} with layers of kind {shown(kinds.pop())} is not supported")
    return ConfigKeys({key: value for key, value in keys.config.items() if key != "layer_types"}, keys.where)


def _score_factor(keys: ConfigKeys) -> float:
    """Return the factor of the scores of a model with an extended context: (0.1 mscale_all_dim ln(factor) + 1)^2."""
    settings = ConfigKeys(keys.section("rope_parameters", "rope_scaling"), "rope parameters")
    if settings.text("rope_type", "type", default="default") == "default":
        return 1.0
    weight, factor = settings.number("mscale_all_dim", default=0), settings.number("factor", default=1.0)
    return (0.1 * weight * math.log(factor) + 1.0) ** 2
