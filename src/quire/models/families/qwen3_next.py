"""Qwen3-Next-80B-A3B: three of four layers are Gated DeltaNet, the others attention with a gate; many small experts.

The layers for multi-token prediction are not loaded.
"""

from __future__ import annotations

from typing import Any, Literal

from quire.layers.mixer_params import DeltaParams
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, refuse_bias, routing
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec


def linear_layers(keys: ConfigKeys) -> tuple[bool, ...]:
    """Return, for each layer, whether it is linear attention instead of full attention."""
    layers = keys.integer("num_hidden_layers")
    every = keys.integer("full_attention_interval", default=4)
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    kinds = keys.entries("layer_types", str) or kinds
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        wanted = f"{layers} entries of linear_attention or full_attention"
        raise keys.refuse("layer_types", wanted, kinds)
    return tuple(kind == "linear_attention" for kind in kinds)


def delta_fields(name: str, keys: ConfigKeys, stored: Literal["grouped", "split"]) -> dict[str, Any]:
    """Parse what Qwen3-Next and Qwen3.5 have in common, as arguments of `decoder_spec`."""
    refuse_bias(name, keys)
    linear = linear_layers(keys)
    key_heads = keys.integer("linear_num_key_heads", default=16)
    value_heads = keys.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        raise keys.refuse("linear_num_value_heads", f"a multiple of {key_heads} key heads", value_heads)
    mixer = DeltaParams(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.integer("linear_key_head_dim", default=128),
        value_dim=keys.integer("linear_value_head_dim", default=128),
        width=keys.integer("linear_conv_kernel_dim", default=4, minimum=2),
        stored=stored,
    )
    return {
        "default_dim": 256,
        "rope": RopeDefaults(partial=0.25),
        "norm": "offset_rms",
        "qk_norm": True,
        "query_gate": True,
        "mixer": mixer,
        "mixes": linear,
        "attends": tuple(not each for each in linear),
        "names": {"mixer": "linear_attn"},
    }


def sparse_layers(keys: ConfigKeys, experts: int, per_token: int, width: int, shared: int) -> MoESpec:
    """Parse the experts; the arguments are the defaults of their sizes."""
    layers = keys.integer("num_hidden_layers")
    dense = set(keys.entries("mlp_only_layers", int) or [])
    every = keys.integer("decoder_sparse_step", default=1)
    return MoESpec(
        routing=routing(
            keys,
            keys.integer("num_experts", "num_local_experts", default=experts),
            keys.integer("num_experts_per_tok", default=per_token),
            renormalise=keys.flag("norm_topk_prob", default=True),
        ),
        intermediate_size=keys.integer("moe_intermediate_size", default=width),
        sparse=tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
        shared_size=keys.integer("shared_expert_intermediate_size", default=shared),
        shared_gate=True,
    )


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    moe = sparse_layers(keys, experts=512, per_token=10, width=512, shared=512)
    fields = delta_fields(name, keys, "grouped")
    return decoder_spec(name, "hybrid", keys.without("layer_types"), kv_default=2, moe=moe, **fields)


FAMILY = Family(
    title="Qwen3-Next",
    architectures=names("Qwen3Next", "qwen3_next"),
    parse=_parse,
    special="Gated DeltaNet in three of four layers, gated attention with partial rotation, a shared expert with a gate",
    gguf=("qwen3next",),
    tools="hermes",
    reasoning="think",
)
