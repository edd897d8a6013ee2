"""Phi-3.5-MoE."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window, routing
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError


def _rope(name: str, keys: ConfigKeys) -> dict[str, object]:
    """Return the rotary parameters, with the factor of cos and sin by its usual name."""
    rope = dict(keys.section("rope_parameters", "rope_scaling"))
    short, long = rope.pop("short_mscale", None), rope.pop("long_mscale", None)
    if short != long:
        raise ModelError(f"{name} with different short_mscale and long_mscale is not supported")
    return rope if long is None else {**rope, "attention_factor": long}


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if (top_k := keys.integer("num_experts_per_tok", default=2)) != 2:
        raise ModelError(f"{name} with num_experts_per_tok {top_k} is not supported: its routing is for two")
    jitter = keys.number("router_jitter_noise", default=0.01)
    experts, bias = keys.integer("num_local_experts", default=16), keys.flag("attention_bias")
    moe = MoESpec(
        routing=routing(keys, experts, top_k, scores="sparsemixer", jitter=jitter),
        intermediate_size=keys.integer("intermediate_size"),
        sparse=(True,) * keys.integer("num_hidden_layers"),
    )
    return decoder_spec(
        name,
        "moe",
        ConfigKeys({**keys.config, "rope_parameters": _rope(name, keys)}, keys.where),
        window=optional_window(keys),
        kv_default=8,
        eps=1e-5,
        norm="layer",
        qkv_bias=bias,
        o_bias=bias,
        head_bias=keys.flag("lm_head_bias"),
        moe=moe,
    )


FAMILY = Family(
    title="Phi-3.5-MoE",
    architectures=("PhiMoEForCausalLM", *names("Phimoe", "phimoe")),
    parse=_parse,
    special="LayerNorm, experts chosen by SparseMixer, longrope",
    gguf=("phimoe",),
)
