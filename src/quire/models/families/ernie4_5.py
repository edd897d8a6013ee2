"""ERNIE 4.5, dense."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("use_bias")
    return decoder_spec(
        name,
        "ernie4_5",
        keys,
        default_dim=128,
        kv_default=2,
        eps=1e-5,
        tie=True,
        rope=RopeDefaults(theta=5e5, interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(
    title="ERNIE 4.5 (dense)",
    architectures=names("Ernie4_5", "ernie4_5"),
    parse=_parse,
    special="interleaved rotation",
    gguf=("ernie4_5",),
    reasoning="think",
)
