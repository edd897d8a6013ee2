"""LFM2-8B-A1B: LFM2 with experts in all but the first layers."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import routing
from quire.models.families import Family, names
from quire.models.families.lfm2 import attending, conv_decoder
from quire.models.spec import ModelSpec, MoESpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    dense = keys.integer("num_dense_layers", default=2, minimum=0)
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_experts", default=32),
            keys.integer("num_experts_per_tok", default=4),
            scores="sigmoid",
            correction=keys.flag("use_expert_bias", default=True),
            renormalise=keys.flag("norm_topk_prob", default=True),
            scale=keys.number("routed_scaling_factor", default=1.0),
        ),
        intermediate_size=keys.integer("moe_intermediate_size", default=1792),
        sparse=tuple(i >= dense for i in range(keys.integer("num_hidden_layers"))),
    )
    return conv_decoder(name, keys, attending(keys), moe=moe)


FAMILY = Family(
    title="LFM2-MoE",
    architectures=names("Lfm2Moe", "lfm2_moe"),
    parse=_parse,
    special="LFM2 with experts, sigmoid routing with a correction bias",
    gguf=("lfm2moe",),
    tools="lfm2",
)
