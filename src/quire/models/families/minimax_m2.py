"""MiniMax-M2 and MiniMax-M2.1."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    head_dim = keys.integer("head_dim", default=128)
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_local_experts", "num_experts", default=256),
            keys.integer("num_experts_per_tok", default=8),
            scores="sigmoid",
            correction=True,
            renormalise=True,
        ),
        intermediate_size=keys.integer("intermediate_size"),
        sparse=(True,) * keys.integer("num_hidden_layers"),
    )
    return decoder_spec(
        name,
        "moe",
        keys,
        default_dim=128,
        kv_default=8,
        rope=RopeDefaults(theta=5e6, partial=keys.integer("rotary_dim", default=head_dim) / head_dim),
        qk_norm=True,
        qk_norm_kind="projection",
        moe=moe,
    )


FAMILY = Family(
    title="MiniMax-M2",
    architectures=names("MiniMaxM2", "minimax_m2"),
    parse=_parse,
    special="sigmoid routing with a correction bias, rotation of half a head, norm of all q and of all k heads together",
    gguf=("minimax-m2",),
    reasoning="think",
)
