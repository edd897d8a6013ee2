"""OLMoE (arXiv:2409.02060)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if keys.get("clip_qkv", default=None) is not None:
        raise ModelError(f"{name} with clip_qkv is not supported")
    bias = keys.flag("attention_bias")
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_experts", "num_local_experts", default=64),
            keys.integer("num_experts_per_tok", default=8),
            renormalise=keys.flag("norm_topk_prob"),
        ),
        intermediate_size=keys.integer("intermediate_size"),
        sparse=(True,) * keys.integer("num_hidden_layers"),
    )
    return decoder_spec(
        name,
        "moe",
        keys,
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_kind="projection",
        moe=moe,
    )


FAMILY = Family(
    title="OLMoE",
    architectures=names("Olmoe", "olmoe"),
    parse=_parse,
    special="64 experts, norm of all q and of all k heads together",
    gguf=("olmoe",),
)
