"""MiniMax-Text-01 and MiniMax-M1 (arXiv:2501.08313)."""

from __future__ import annotations

from quire.layers.mixer_params import LightningParams
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, parse_head_dim, routing
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec

_HALVES = {"mixer": "linear_attn", "attention": "full_attn", "mlp": "mlp"}


def _mixes(keys: ConfigKeys) -> tuple[bool, ...]:
    """Return, for each layer, whether it is lightning attention."""
    layers = keys.integer("num_hidden_layers")
    flags = keys.entries("attn_type_list", int)  # in the first checkpoints: 0 for lightning attention
    kinds = keys.entries("layer_types", str)
    if kinds is None:
        flags = flags or [int(i % 2 == 0) for i in range(layers)]
        kinds = ["full_attention" if flag else "linear_attention" for flag in flags]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise keys.refuse(
            "layer_types", f"linear_attention or full_attention for each of {layers} layers", kinds
        )
    return tuple(kind == "linear_attention" for kind in kinds)


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    heads, mixes = keys.integer("num_attention_heads"), _mixes(keys)
    dim = parse_head_dim(keys, keys.integer("hidden_size"), heads)
    factors = {
        half: tuple(keys.number(f"{stem}_{which}_factor", default=1.0) for which in ("alpha", "beta"))
        for half, stem in _HALVES.items()
    }
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_local_experts", default=8),
            keys.integer("num_experts_per_tok", default=2),
            renormalise=True,
        ),
        intermediate_size=keys.integer("intermediate_size"),
        sparse=(True,) * len(mixes),
    )
    return decoder_spec(
        name,
        "minimax",
        keys.without("layer_types"),
        kv_default=8,
        eps=1e-5,
        rope=RopeDefaults(theta=1e6, partial=keys.integer("rotary_dim", default=dim) / dim),
        mixer=LightningParams(heads=heads, head_dim=dim),
        mixes=mixes,
        attends=tuple(not each for each in mixes),
        residual_factors=factors,
        moe=moe,
        names={"mixer": "self_attn"},
    )


FAMILY = Family(
    title="MiniMax-Text-01, MiniMax-M1",
    architectures=names("MiniMax", "MiniMaxText01ForCausalLM", "minimax", "minimax_text_01"),
    parse=_parse,
    special="lightning attention in most layers, a residual stream of normed values",
    tools="json",
)
