"""Granite 3 with experts. The residual stream is scaled as in granite.py."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.families import Family, names
from quire.models.families.granite import multipliers, with_scaled_stream
from quire.models.spec import ModelSpec, MoESpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias, experts = keys.flag("attention_bias"), keys.integer("num_local_experts", default=8)
    moe = MoESpec(
        routing=routing(keys, experts, keys.integer("num_experts_per_tok", default=2), renormalise=True),
        intermediate_size=keys.integer("intermediate_size"),
        sparse=(True,) * keys.integer("num_hidden_layers"),
    )
    own = {
        "gate": "router.layer",
        "experts": "",
        "stacked_gate_up_proj": "input_linear.weight",
        "stacked_down_proj": "output_linear.weight",
    }
    spec = decoder_spec(
        name, "moe", keys, qkv_bias=bias, o_bias=bias, moe=moe, names=own, **multipliers(keys)
    )
    return with_scaled_stream(spec, keys)


FAMILY = Family(
    title="Granite 3 MoE",
    architectures=names("GraniteMoe", "granitemoe"),
    parse=_parse,
    special="Granite 3 with experts",
    gguf=("granitemoe",),
    tools="granite",
    reasoning="granite",
)
