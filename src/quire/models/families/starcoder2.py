"""StarCoder2 (arXiv:2402.19173)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("use_bias", default=True)
    return decoder_spec(
        name,
        "starcoder2",
        keys,
        window=optional_window(keys),
        kv_default=2,
        eps=1e-5,
        eps_key="norm_epsilon",
        activation=keys.text("hidden_act", default="gelu_pytorch_tanh"),
        tie=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm="layer",
        mlp="plain",
        names={"up_proj": "c_fc", "down_proj": "c_proj"},
    )


FAMILY = Family(
    title="StarCoder2",
    architectures=names("Starcoder2", "starcoder2"),
    parse=_parse,
    special="LayerNorm, an MLP without gate, biases",
    gguf=("starcoder2",),
)
