"""Ministral 3, and other text models of Mistral's multimodal checkpoints of that kind."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, QueryGrowth

_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if not keys.section("rope_parameters", "rope_scaling"):
        keys = ConfigKeys({**keys.config, "rope_parameters": _ROPE}, keys.where)
    rope = ConfigKeys(keys.section("rope_parameters", "rope_scaling"), "rope parameters")
    beta = rope.number("llama_4_scaling_beta", default=0.0)
    length = rope.integer("original_max_position_embeddings", default=16384)
    return decoder_spec(
        name,
        "ministral3",
        keys,
        window=optional_window(keys),
        default_dim=128,
        kv_default=8,
        theta=1e6,
        eps=1e-5,
        query_growth=QueryGrowth(beta=beta, length=length) if beta else None,
    )


FAMILY = Family(
    title="Ministral 3",
    architectures=names("Ministral3", "ministral3"),
    parse=_parse,
    special="queries grow with their position",
    gguf=("mistral3",),
    tools="mistral",
    reasoning="mistral",
)
