"""Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3 Nano."""

from __future__ import annotations

from quire.layers.mixer_params import StateSpaceParams
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import corrected_routing, decoder_spec
from quire.models.config.states import checked_groups
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError

_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def _kinds(keys: ConfigKeys) -> list[str]:
    """Return the kind of each layer, from a list or from one letter per layer."""
    listed = next(
        filter(None, (keys.entries(name, str) for name in ("layers_block_type", "layer_types"))), None
    )
    if listed is None:
        pattern = keys.text("hybrid_override_pattern")
        listed = [_LETTERS.get(letter, letter) for letter in pattern]
    kinds = [_OLD_KINDS.get(kind, kind) for kind in listed]
    if not kinds or set(kinds) - set(_LETTERS.values()):
        raise keys.refuse("layers_block_type", f"a list of {', '.join(_LETTERS.values())}", listed)
    return kinds


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if keys.text("mamba_hidden_act", default="silu") != "silu" or keys.flag("attention_bias"):
        raise ModelError(
            f"{name} with another mamba_hidden_act than silu, or with attention_bias, is not supported"
        )
    kinds = _kinds(keys)
    heads, bias = keys.integer("mamba_num_heads", default=128), keys.flag("use_bias")
    eps = keys.number("layer_norm_epsilon", default=1e-5)
    mixer = StateSpaceParams(
        heads=heads,
        head_dim=keys.integer("mamba_head_dim", default=64),
        groups=checked_groups(keys, "n_groups", heads, 8),
        state_dim=keys.integer("ssm_state_size", default=128),
        width=keys.integer("conv_kernel", default=4, minimum=2),
        conv_bias=keys.flag("use_conv_bias", default=True),
        proj_bias=bias,
        out_bias=bias,
        step_limits=(keys.number("time_step_min", default=0.001), float("inf")),
        eps=eps,
    )
    keys = ConfigKeys({**keys.config, "num_hidden_layers": len(kinds)}, keys.where)
    return decoder_spec(
        name,
        "nemotron_h",
        keys.without("layer_types"),
        default_dim=128,
        kv_default=8,
        eps=1e-5,
        eps_key="layer_norm_epsilon",
        activation=keys.text("mlp_hidden_act", default="relu2"),
        mlp="plain",
        mlp_bias=keys.flag("mlp_bias"),
        rotates=(False,) * len(kinds),
        mixer=mixer,
        mixes=tuple(kind == "linear_attention" for kind in kinds),
        attends=tuple(kind == "full_attention" for kind in kinds),
        feeds=tuple(kind in ("moe", "mlp") for kind in kinds),
        moe=_experts(keys, kinds) if "moe" in kinds else None,
        names={
            "embed_tokens": "embeddings", "norm": "norm_f", "layer_norm": "norm", "mixer": "mixer",
            "attention": "mixer", "mlp": "mixer",
        },
    )  # fmt: skip


def _experts(keys: ConfigKeys, kinds: list[str]) -> MoESpec:
    latent = keys.get("moe_latent_size", default=None)
    return MoESpec(
        routing=corrected_routing(keys, experts=8, top_k=2),
        intermediate_size=keys.integer("moe_intermediate_size", default=7688),
        sparse=tuple(kind == "moe" for kind in kinds),
        shared_size=keys.integer("moe_shared_expert_intermediate_size", default=7688),
        latent_size=0 if latent is None else keys.integer("moe_latent_size"),
    )


FAMILY = Family(
    title="Nemotron-H, Nemotron Nano 2 and 3",
    architectures=names("NemotronH", "nemotron_h"),
    parse=_parse,
    special="Mamba-2, attention without rotation, and MLPs or experts without gates as layers of their own",
    gguf=("nemotron_h", "nemotron_h_moe"),
    tools="qwen3_coder",
    reasoning="think",
)
