"""Hunyuan dense (0.5B to 7B)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec

NORM_NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def with_alpha(keys: ConfigKeys) -> ConfigKeys:
    """Return the config with a larger base instead of this family's dynamic rule with alpha."""
    rope = keys.section("rope_parameters", "rope_scaling")
    settings = ConfigKeys({"rope_theta": keys.get("rope_theta", default=1e4), **rope}, "rope parameters")
    if settings.text("rope_type", "type", default="default") == "dynamic" and settings.has("alpha"):
        dim = keys.get("head_dim", default=None) or keys.integer("hidden_size") // keys.integer(
            "num_attention_heads"
        )
        theta = settings.number("rope_theta") * settings.number("alpha") ** (dim / (dim - 2))
        keys = ConfigKeys({**keys.config, "rope_parameters": {"rope_theta": theta}}, keys.where)
    return keys


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(
        name,
        "hunyuan_dense",
        with_alpha(keys),
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_kind="rotated",
        names=NORM_NAMES,
    )


FAMILY = Family(
    title="Hunyuan dense",
    architectures=names("HunYuanDenseV1", "hunyuan_v1_dense"),
    parse=_parse,
    special="norms of q and k heads behind the rotation",
    gguf=("hunyuan-dense",),
    reasoning="think",
)
