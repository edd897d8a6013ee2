"""Hunyuan with experts (A13B)."""

from __future__ import annotations

from typing import Any

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.families import Family, names
from quire.models.families.hunyuan_dense import NORM_NAMES, with_alpha
from quire.models.spec import ModelSpec, MoESpec


def _same(keys: ConfigKeys, name: str) -> int:
    """Return a number that the config may repeat for each layer."""
    value: Any = keys.get(name, default=1)
    values = value if isinstance(value, list) and value else [value]
    if any(other != values[0] for other in values):
        raise keys.refuse(name, "the same for all layers", value)
    return ConfigKeys({name: values[0]}, keys.where).integer(name)


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias, width = keys.flag("attention_bias"), keys.integer("intermediate_size")
    moe = MoESpec(
        routing=routing(keys, _same(keys, "num_experts"), _same(keys, "moe_topk"), renormalise=True),
        intermediate_size=width,
        sparse=(True,) * keys.integer("num_hidden_layers"),
        shared_size=width,
    )
    return decoder_spec(
        name,
        "moe",
        with_alpha(keys),
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_kind="rotated",
        names={**NORM_NAMES, "gate": "gate.wg", "shared_experts": "shared_mlp"},
        moe=moe,
    )


FAMILY = Family(
    title="Hunyuan MoE (A13B)",
    architectures=names("HunYuanMoEV1", "hunyuan_v1_moe"),
    parse=_parse,
    special="experts, a shared expert, norms of q and k heads behind the rotation",
    gguf=("hunyuan-moe",),
    reasoning="think",
)
