"""ERNIE 4.5 with experts."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if keys.flag("use_bias"):
        raise ModelError(f"{name} with use_bias is not supported")
    layers, width = keys.integer("num_hidden_layers"), keys.integer("moe_intermediate_size", default=1536)
    first = keys.integer("moe_layer_start_index", default=1, minimum=0)
    last = keys.integer("moe_layer_end_index", default=-1, minimum=-1) % layers
    every = keys.integer("moe_layer_interval", default=1)
    experts, top_k = keys.integer("moe_num_experts", default=64), keys.integer("moe_k", default=6)
    moe = MoESpec(
        routing=routing(keys, experts, top_k, correction=True, renormalise=True),
        intermediate_size=width,
        sparse=tuple(first <= i <= last and (i + 1) % every == 0 for i in range(layers)),
        shared_size=width * keys.integer("moe_num_shared_experts", default=2, minimum=0),
    )
    rope = RopeDefaults(theta=5e5, interleaved=True)
    return decoder_spec(name, "moe", keys, kv_default=4, eps=1e-5, tie=True, rope=rope, moe=moe)


FAMILY = Family(
    title="ERNIE 4.5 (MoE)",
    architectures=names("Ernie4_5_Moe", "ernie4_5_moe"),
    parse=_parse,
    special="interleaved rotation, softmax routing with a correction bias, shared experts, first layer dense",
    gguf=("ernie4_5-moe",),
    reasoning="think",
)
