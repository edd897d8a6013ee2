"""GLM-4.7-Flash: latent attention, and experts as in GLM-4.5."""

from __future__ import annotations

from quire.models.config.deepseek import latent_spec, parse_experts
from quire.models.config.keys import ConfigKeys
from quire.models.families import Family, names
from quire.models.spec import ModelSpec

_DEFAULTS = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "num_experts_per_tok": 4}


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = ConfigKeys({**_DEFAULTS, **keys.config}, keys.where)
    moe = parse_experts(
        name,
        keys,
        experts=64,
        first_dense=1,
        shared=1,
        width=1536,
        scale=1.8,
        scores="sigmoid",
        correction=True,
        renormalise=keys.flag("norm_topk_prob", default=True),
        groups=keys.integer("n_group", default=1),
        top_groups=keys.integer("topk_group", default=1),
        group_score="two_largest",
    )
    return latent_spec(name, keys, moe, keys.flag("rope_interleave", default=True), eps=1e-5)


FAMILY = Family(
    title="GLM-4.7-Flash",
    architectures=names("Glm4MoeLite", "glm4_moe_lite"),
    parse=_parse,
    special="latent attention, sigmoid routing with a correction bias, a shared expert, first layer dense",
    gguf=("deepseek2",),
    tools="glm45",
    reasoning="think",
)
