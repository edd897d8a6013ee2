"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (arXiv:2508.06471).

The layer for multi-token prediction behind the last one is loaded for `spec_method` mtp only.
"""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import corrected_routing, decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    dense = keys.integer("first_k_dense_replace", default=1, minimum=0)
    width = keys.integer("moe_intermediate_size", default=1408)
    moe = MoESpec(
        routing=corrected_routing(keys, experts=128, top_k=8),
        intermediate_size=width,
        sparse=tuple(i >= dense for i in range(keys.integer("num_hidden_layers"))),
        shared_size=width * keys.integer("n_shared_experts", default=1),
    )
    return decoder_spec(
        name,
        "moe",
        keys,
        kv_default=8,
        eps=1e-5,
        rope=RopeDefaults(partial=0.5),
        qkv_bias=keys.flag("attention_bias"),
        qk_norm=keys.flag("use_qk_norm"),
        moe=moe,
        extra_layers=keys.integer("num_nextn_predict_layers", default=1, minimum=0),
    )


FAMILY = Family(
    title="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    architectures=names("Glm4Moe", "glm4_moe"),
    parse=_parse,
    special="sigmoid routing with a correction bias, shared experts, first layers dense, rotation of half a head",
    gguf=("glm4moe",),
    tools="glm45",
    reasoning="think",
    heads=("eagle", "eagle3", "mtp"),
)
