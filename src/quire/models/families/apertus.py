"""Apertus (arXiv:2509.14233)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec

_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    if not keys.section("rope_parameters", "rope_scaling"):
        keys = ConfigKeys({**keys.config, "rope_parameters": _ROPE}, keys.where)
    activation = keys.text("hidden_act", default="xielu")
    spec = decoder_spec(
        name,
        "apertus",
        keys,
        eps=1e-5,
        theta=12e6,
        activation="silu" if activation == "xielu" else activation,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        mlp="plain",
        names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
    )
    return replace(spec, activation=activation) if activation == "xielu" else spec


FAMILY = Family(
    title="Apertus",
    architectures=names("Apertus", "apertus"),
    parse=_parse,
    special="xIELU in an MLP without gate, norms of q and k heads",
    gguf=("apertus",),
)
