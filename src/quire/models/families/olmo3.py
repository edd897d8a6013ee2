"""OLMo 3 (arXiv:2512.13961)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias, layers = keys.flag("attention_bias"), keys.integer("num_hidden_layers")
    return decoder_spec(
        name,
        "olmo3",
        keys,
        window=keys.integer("sliding_window", default=4096),
        pattern=["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(layers)],
        eps=1e-5,
        rope=RopeDefaults(theta=5e5, local_theta=5e5),
        qkv_bias=bias,
        o_bias=bias,
        layout="post",
        qk_norm=True,
        qk_norm_kind="projection",
    )


FAMILY = Family(
    title="OLMo 3",
    architectures=names("Olmo3", "olmo3"),
    parse=_parse,
    special="OLMo 2 with windows in three of four layers, which keep the plain rotation",
    gguf=("olmo2",),
    tools="olmo3",
    reasoning="think",
)
