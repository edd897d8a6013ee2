"""dots.llm1 (arXiv:2506.05767)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import corrected_routing, decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    layers = keys.integer("num_hidden_layers")
    dense = keys.integer("first_k_dense_replace", default=0, minimum=0)
    width = keys.integer("moe_intermediate_size", default=1408)
    bias = keys.flag("attention_bias")
    moe = MoESpec(
        routing=corrected_routing(keys, renormalises=False),
        intermediate_size=width,
        sparse=tuple(i >= dense for i in range(layers)),
        shared_size=width * keys.integer("n_shared_experts"),
    )
    has_windows = not (keys.has("sliding_window") and keys.get("sliding_window", default=None) is None)
    first = keys.integer("max_window_layers", default=62, minimum=0) if has_windows else layers
    return decoder_spec(
        name,
        "moe",
        keys,
        kv_default=32,
        window=keys.integer("sliding_window", default=4096) if has_windows else None,
        pattern=["sliding_attention" if i >= first else "full_attention" for i in range(layers)],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        moe=moe,
    )


FAMILY = Family(
    title="dots.llm1",
    architectures=names("Dots1", "dots1"),
    parse=_parse,
    special="sigmoid routing with a correction bias, shared experts, first layers dense",
    gguf=("dots1",),
)
