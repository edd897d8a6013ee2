"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B (arXiv:2407.10671)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    layers = keys.integer("num_hidden_layers")
    dense = set(keys.entries("mlp_only_layers", int) or [])
    every = keys.integer("decoder_sparse_step", default=1)
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_experts", "num_local_experts", default=60),
            keys.integer("num_experts_per_tok", default=4),
            renormalise=keys.flag("norm_topk_prob"),
        ),
        intermediate_size=keys.integer("moe_intermediate_size", default=1408),
        sparse=tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
        shared_size=keys.integer("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )
    has_windows = keys.flag("use_sliding_window")
    windowed = keys.integer("max_window_layers", default=28, minimum=0) if has_windows else 0
    return decoder_spec(
        name,
        "moe",
        keys,
        window=keys.integer("sliding_window", default=4096) if has_windows else None,
        pattern=["full_attention" if i % 2 or i >= windowed else "sliding_attention" for i in range(layers)],
        kv_default=16,
        qkv_bias=keys.flag("qkv_bias", default=True),
        moe=moe,
    )


FAMILY = Family(
    title="Qwen1.5-MoE, Qwen2-MoE",
    architectures=names("Qwen2Moe", "qwen2_moe"),
    parse=_parse,
    special="60 or 64 experts and a shared one with a gate",
    gguf=("qwen2moe",),
    tools="hermes",
)
