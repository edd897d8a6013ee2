"""OLMo 2 (arXiv:2501.00656)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(
        name,
        "olmo2",
        keys,
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        layout="post",
        qk_norm=True,
        qk_norm_kind="projection",
    )


FAMILY = Family(
    title="OLMo 2",
    architectures=names("Olmo2", "olmo2"),
    parse=_parse,
    special="norms after each half, norm of all q and of all k heads together",
    gguf=("olmo2",),
)
