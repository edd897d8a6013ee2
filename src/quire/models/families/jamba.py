"""Jamba (arXiv:2403.19887), Jamba 1.5 and 1.6."""

from __future__ import annotations

import math

from quire.layers.mixer_params import SelectiveScanParams
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, routing
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec


def _every(keys: ConfigKeys, kind: str, period: int, offset: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it is of a kind that returns with a period; the numbers are the defaults."""
    period = keys.integer(f"{kind}_layer_period", default=period)
    offset = keys.integer(f"{kind}_layer_offset", default=offset, minimum=0)
    if offset >= period:
        raise keys.refuse(f"{kind}_layer_offset", f"below {kind}_layer_period {period}", offset)
    return tuple(i % period == offset for i in range(keys.integer("num_hidden_layers")))


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    hidden, attends = keys.integer("hidden_size"), _every(keys, "attn", 8, 4)
    rank = keys.get("mamba_dt_rank", default="auto")
    mixer = SelectiveScanParams(
        inner=keys.integer("mamba_expand", default=2) * hidden,
        state_dim=keys.integer("mamba_d_state", default=16),
        rank=math.ceil(hidden / 16) if rank == "auto" else keys.integer("mamba_dt_rank"),
        width=keys.integer("mamba_d_conv", default=4, minimum=2),
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        proj_bias=keys.flag("mamba_proj_bias"),
    )
    experts = keys.integer("num_experts", "num_local_experts", default=16)
    moe = MoESpec(
        routing=routing(keys, experts, keys.integer("num_experts_per_tok", default=2)),
        intermediate_size=keys.integer("intermediate_size"),
        sparse=_every(keys, "expert", 2, 1),
    ) if experts > 1 else None  # fmt: skip
    return decoder_spec(
        name,
        "hybrid",
        keys.without("layer_types"),
        kv_default=8,
        rotates=(False,) * len(attends),
        mixer=mixer,
        mixes=tuple(not each for each in attends),
        attends=attends,
        moe=moe,
        names={
            "norm": "final_layernorm", "post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward",
        },
    )  # fmt: skip


FAMILY = Family(
    title="Jamba",
    architectures=names("Jamba", "jamba"),
    parse=_parse,
    special="Mamba-1 in seven of eight layers, attention without rotation, experts in every other layer",
    gguf=("jamba",),
    tools="apriel",
)
