"""GLM-4-9B, in the format of transformers."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    return decoder_spec(
        name,
        "glm",
        keys,
        default_dim=128,
        kv_default=2,
        eps=1.5625e-07,
        rope=RopeDefaults(partial=0.5, interleaved=True),
        qkv_bias=keys.flag("attention_bias", default=True),
        fused_gate_up=True,
    )


FAMILY = Family(
    title="GLM-4-9B",
    architectures=names("Glm", "glm"),
    parse=_parse,
    special="interleaved rotation of half a head",
    gguf=("chatglm",),
)
