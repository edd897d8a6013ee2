"""Qwen3 (arXiv:2505.09388); the text part of Qwen3-VL."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, window_from
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(
        name,
        "qwen",
        keys,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        window_from=window_from(keys),
        default_dim=128,
        kv_default=32,
    )


FAMILY = Family(
    title="Qwen 3, text of Qwen 3-VL",
    architectures=names("Qwen3", "qwen3", "qwen3_vl_text"),
    parse=_parse,
    special="norms of q and k heads",
    gguf=("qwen3", "qwen3vl"),
    tools="hermes",
    reasoning="think",
)
