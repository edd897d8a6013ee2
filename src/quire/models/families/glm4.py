"""GLM-4-0414: GLM-4-9B, GLM-4-32B, GLM-Z1."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    return decoder_spec(
        name,
        "glm4",
        keys,
        default_dim=128,
        kv_default=2,
        eps=1.5625e-07,
        rope=RopeDefaults(partial=0.5, interleaved=True),
        qkv_bias=keys.flag("attention_bias", default=True),
        layout="sandwich",
        names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        fused_gate_up=True,
    )


FAMILY = Family(
    title="GLM-4-0414, GLM-Z1",
    architectures=names("Glm4", "glm4"),
    parse=_parse,
    special="norms before and after each half, interleaved rotation of half a head",
    gguf=("glm4",),
    reasoning="think",
)
