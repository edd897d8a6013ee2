"""Mistral 4: latent attention whose queries grow with their position, and experts."""

from __future__ import annotations

from quire.models.config.deepseek import latent_spec, parse_experts
from quire.models.config.keys import ConfigKeys
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, QueryGrowth

_DEFAULTS = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "num_experts_per_tok": 4}
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    rope = dict(keys.section("rope_parameters", "rope_scaling") or _ROPE)
    rope.pop("partial_rotary_factor", None)  # says that only the rotated part of a head is rotated
    keys = ConfigKeys({**_DEFAULTS, **keys.config, "rope_parameters": rope}, keys.where)
    moe = parse_experts(
        name,
        keys,
        experts=128,
        first_dense=0,
        shared=1,
        width=2048,
        scale=1.0,
        renormalise=keys.flag("norm_topk_prob", default=True),
        groups=keys.integer("n_group", default=1),
        top_groups=keys.integer("topk_group", default=1),
        group_score="two_largest",
    )
    settings = ConfigKeys(rope, "rope parameters")
    beta = settings.number("llama_4_scaling_beta", default=0.0)
    length = settings.integer("original_max_position_embeddings", default=8192)
    growth = QueryGrowth(beta=beta, length=length) if beta else None
    interleaved = keys.flag("rope_interleave", default=True)
    return latent_spec(name, keys, moe, interleaved, query_growth=growth)


FAMILY = Family(
    title="Mistral 4",
    architectures=names("Mistral4", "mistral4"),
    parse=_parse,
    special="latent attention whose queries grow with their position, experts, a shared expert",
    gguf=("mistral4",),
    tools="mistral",
    reasoning="mistral",
)
