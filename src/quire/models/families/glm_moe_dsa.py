"""GLM-5: latent attention over tokens that an indexer chooses, also for the layers behind it (arXiv:2603.12201)."""

from __future__ import annotations

from quire.models.config.deepseek import latent_spec, parse_index, sigmoid_experts, without_kinds
from quire.models.config.keys import ConfigKeys
from quire.models.families import Family, names
from quire.models.spec import ModelSpec

_DEFAULTS = {
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def _indexed(keys: ConfigKeys, layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it has an indexer."""
    kinds, pattern = keys.entries("indexer_types", str), keys.get("index_topk_pattern", default=None)
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        every = keys.integer("index_topk_freq", default=1)
        offset = keys.integer("index_skip_topk_offset", default=2, minimum=0)
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise keys.refuse(
            "indexer_types", f"a list of {layers} entries full or shared, the first one full", kinds
        )
    return tuple(kind == "full" for kind in kinds)


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = without_kinds(name, ConfigKeys({**_DEFAULTS, **keys.config}, keys.where))
    indexed = _indexed(keys, keys.integer("num_hidden_layers"))
    index = parse_index(keys, heads=32, interleaved=True, layers=indexed)
    return latent_spec(name, keys, sigmoid_experts(name, keys), interleaved=True, index=index, eps=1e-5)


FAMILY = Family(
    title="GLM-5",
    architectures=names("GlmMoeDsa", "glm_moe_dsa"),
    parse=_parse,
    special="latent attention, sparse as in DeepSeek-V3.2; layers without an indexer use the choice of the last one",
    gguf=("glm-dsa",),
    tools="glm45",
    reasoning="think",
)
