"""Qwen3.5 with experts, text part."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, text_part
from quire.models.families import Family
from quire.models.families.qwen3_next import delta_fields, sparse_layers
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = text_part(keys)
    # This family has experts in all layers, and no MLP whose width a config could give.
    width = keys.integer("moe_intermediate_size", default=512)
    keys = ConfigKeys({"intermediate_size": width, **keys.config}, keys.where)
    moe = sparse_layers(keys, experts=256, per_token=8, width=512, shared=512)
    fields = delta_fields(name, keys, "split")
    return decoder_spec(name, "hybrid", keys.without("layer_types"), kv_default=2, moe=moe, **fields)


FAMILY = Family(
    title="Qwen3.5-MoE (text)",
    architectures=(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextModel",
        "qwen3_5_moe_text",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeModel",
        "qwen3_5_moe",
    ),
    parse=_parse,
    special="Qwen3.5 with many small experts and a shared one with a gate",
    gguf=("qwen35moe",),
    tools="qwen3_coder",
    reasoning="think",
)
