"""DeepSeek-V3.2 (arXiv:2512.02556): V3 with sparse attention."""

from __future__ import annotations

from quire.models.config.deepseek import latent_spec, parse_index, sigmoid_experts, without_kinds
from quire.models.config.keys import ConfigKeys
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = without_kinds(name, keys)
    every = (True,) * keys.integer("num_hidden_layers")
    index = parse_index(keys, heads=64, interleaved=False, layers=every)
    return latent_spec(name, keys, sigmoid_experts(name, keys), interleaved=True, index=index)


FAMILY = Family(
    title="DeepSeek-V3.2",
    architectures=names("DeepseekV32", "deepseek_v32"),
    parse=_parse,
    special="DeepSeek-V3 with sparse attention: an indexer chooses 2,048 tokens for each query",
    tools="deepseek_v3",
    reasoning="think",
)
