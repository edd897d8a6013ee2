"""Llama 2 and 3.x (arXiv:2302.13971, arXiv:2407.21783), and models of the same architecture."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(name, "llama", keys, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"))


FAMILY = Family(
    title="Llama 2, 3, 3.1, 3.2, 3.3",
    architectures=names("Llama", "llama"),
    parse=_parse,
    special="the decoder without changes; Llama 3.1's rotary scaling",
    gguf=("llama",),
    tools="llama3_json",
)
