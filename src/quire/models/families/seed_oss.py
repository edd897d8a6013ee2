"""Seed-OSS."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    return decoder_spec(
        name,
        "seed_oss",
        keys,
        default_dim=128,
        kv_default=8,
        qkv_bias=keys.flag("attention_bias", default=True),
        o_bias=keys.flag("attention_out_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


FAMILY = Family(
    title="Seed-OSS",
    architectures=names("SeedOss", "seed_oss"),
    parse=_parse,
    special="biases of q, k and v",
    gguf=("seed_oss",),
    tools="seed_oss",
    reasoning="seed_oss",
)
