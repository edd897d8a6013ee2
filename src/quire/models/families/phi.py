"""Phi-1.5 and Phi-2."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec
from quire.types import ModelError


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if keys.flag("qk_layernorm"):
        raise ModelError(f"{name} with qk_layernorm is not supported")
    return decoder_spec(
        name,
        "phi",
        keys,
        eps=1e-5,
        eps_key="layer_norm_eps",
        rope=RopeDefaults(partial=0.5),
        activation=keys.text("hidden_act", default="gelu_new"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        layout="parallel",
        norm="layer",
        mlp="plain",
        names={"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "norm": "final_layernorm"},
    )


FAMILY = Family(
    title="Phi-1.5, Phi-2",
    architectures=names("Phi", "phi"),
    parse=_parse,
    special="one LayerNorm for attention and MLP, no gate, partial rotation",
    gguf=("phi2",),
)
