"""Falcon-H1 (arXiv:2507.22448).

Scales of the attention's input and keys are part of `query_scale`; that of its values joins the scale of its result.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.states import state_space
from quire.models.families import Family, names
from quire.models.spec import ModelSpec
from quire.types import ModelError

_SCALES = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    embedding, head, key, attn_in, attn_out, ssm_in, ssm_out = (
        keys.number(each, default=1.0) for each in _SCALES
    )
    bias, proj_bias = keys.flag("attention_bias"), keys.flag("mamba_proj_bias")
    if (bias and attn_in != 1) or (proj_bias and ssm_in != 1):
        raise ModelError(f"{name} with biases and scaled inputs is not supported")
    inner = keys.integer("mamba_d_ssm", default=1024)
    if keys.has("mamba_d_ssm") and keys.get("mamba_d_ssm", default=None) is None:
        inner = keys.integer("mamba_expand", default=2) * keys.integer("hidden_size")
    layers = keys.integer("num_hidden_layers")
    mlp_scales, scales = (
        keys.numbers(each, max_length=count) if keys.get(each, default=None) else (1.0,) * count
        for each, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5))
    )
    norm = "front" if keys.flag("mamba_norm_before_gate", default=True) else "behind"
    mixer = state_space(
        keys,
        inner,
        heads=128,
        groups=1,
        state_dim=256,
        norm=norm if keys.flag("mamba_rms_norm") else None,
        out_bias=keys.flag("projectors_bias"),
        scales=tuple(ssm_in * scale for scale in scales),
        eps=keys.number("rms_norm_eps", default=1e-5),
    )
    spec = decoder_spec(
        name,
        "falcon_h1",
        keys.without("layer_types", "layers_block_type"),
        kv_default=8,
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        embedding_scale=embedding,
        logit_scale=head,
        mixer=mixer,
        mixes=(True,) * layers,
        half_scales=(attn_in * attn_out, ssm_out),
        mlp_scales=mlp_scales,
        names={
            "norm": "final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp": "feed_forward",
        },
    )
    return replace(spec, query_scale=spec.query_scale * attn_in**2 * key)


FAMILY = Family(
    title="Falcon-H1",
    architectures=names("FalconH1", "falcon_h1"),
    parse=_parse,
    special="attention and Mamba-2 side by side in each layer, scaled halves",
    gguf=("falcon-h1",),
    tools="hermes",
)
