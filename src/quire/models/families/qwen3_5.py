"""Qwen3.5, dense, text part: Qwen3-Next with one MLP per layer."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, text_part
from quire.models.families import Family
from quire.models.families.qwen3_next import delta_fields
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = text_part(keys)
    fields = delta_fields(name, keys, "split")
    return decoder_spec(name, "hybrid", keys.without("layer_types"), kv_default=4, **fields)


FAMILY = Family(
    title="Qwen3.5 (text)",
    architectures=(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextModel",
        "qwen3_5_text",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Model",
        "qwen3_5",
    ),
    parse=_parse,
    special="Gated DeltaNet in three of four layers, gated attention with partial rotation",
    gguf=("qwen35",),
    tools="qwen3_coder",
    reasoning="think",
)
