"""Granite 4: Mamba-2 and attention, dense or with experts. See granite.py for the scaled residual stream."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.config.states import state_space
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec

_KINDS = {
    "linear_attention": True, "mamba": True, "full_attention": False, "attention": False,
}  # fmt: skip


def _mixes(keys: ConfigKeys) -> tuple[bool, ...]:
    """Return, for each layer, whether it is Mamba-2."""
    layers = keys.integer("num_hidden_layers")
    kinds = next(
        filter(None, (keys.entries(each, str) for each in ("layer_types", "layers_block_type"))), None
    )
    kinds = kinds or ["mamba"] * layers
    if len(kinds) != layers or set(kinds) - set(_KINDS):
        raise keys.refuse("layer_types", f"mamba or attention for each of {layers} layers", kinds)
    return tuple(_KINDS[kind] for kind in kinds)


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias, mixes = keys.flag("attention_bias"), _mixes(keys)
    residual = keys.number("residual_multiplier", default=1.0)
    eps = keys.number("rms_norm_eps", default=1e-6)
    proj_bias = keys.flag("mamba_proj_bias")
    inner = keys.integer("mamba_expand", default=2) * keys.integer("hidden_size")
    mixer = state_space(keys, inner, heads=128, groups=1, state_dim=256, out_bias=proj_bias, eps=eps)
    experts = keys.integer("num_local_experts", default=8, minimum=0)
    moe = MoESpec(
        routing=routing(
            keys, max(experts, 1), keys.integer("num_experts_per_tok", default=2, minimum=0), renormalise=True
        ),
        intermediate_size=keys.integer("intermediate_size", default=11008),
        sparse=(True,) * len(mixes),
        shared_size=keys.integer("shared_intermediate_size", default=1024),
    ) if experts else None  # fmt: skip
    shared = keys.integer("shared_intermediate_size", default=1024)
    keys = ConfigKeys({**keys.config, "intermediate_size": shared}, keys.where)
    rotates = keys.get("position_embedding_type", default="nope") == "rope"
    spec = decoder_spec(
        name,
        "granitemoehybrid",
        keys.without("layer_types"),
        query_scale=keys.number("attention_multiplier", default=1.0),
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=keys.number("embedding_multiplier", default=1.0) / residual,
        logit_scale=1 / keys.number("logits_scaling", default=1.0),
        rotates=(rotates,) * len(mixes),
        fused_gate_up=True,
        mixer=mixer,
        mixes=mixes,
        attends=tuple(not each for each in mixes),
        moe=moe,
        names={"mlp": "shared_mlp", "gate_up_proj": "input_linear", "down_proj": "output_linear"},
    )
    return replace(spec, norm_eps=spec.norm_eps / residual**2)


FAMILY = Family(
    title="Granite 4",
    architectures=names("GraniteMoeHybrid", "granitemoehybrid"),
    parse=_parse,
    special="Mamba-2 in most layers, attention without rotation, experts beside an MLP, multipliers of Granite 3",
    gguf=("granitehybrid",),
    tools="hermes",
)
