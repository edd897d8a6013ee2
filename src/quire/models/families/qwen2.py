"""Qwen2 and Qwen2.5 (arXiv:2407.10671); the text part of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, text_part, window_from
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = text_part(keys)
    return decoder_spec(name, "qwen", keys, qkv_bias=True, window_from=window_from(keys), kv_default=32)


FAMILY = Family(
    title="Qwen 2, 2.5, QwQ, text of Qwen 2-VL and 2.5-VL",
    architectures=(
        *names("Qwen2", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    parse=_parse,
    special="biases of q, k and v",
    gguf=("qwen2", "qwen2vl"),
    tools="hermes",
)
