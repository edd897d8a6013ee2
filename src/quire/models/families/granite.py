"""Granite 3 (dense).

The stream is scaled instead of what each half adds: with x = m y, x + m f(norm(x)) becomes y + f(norm(y)). A norm
divides by the size of its input, so it only needs an epsilon of eps / m^2, and the embeddings start at 1 / m.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    residual = keys.number("residual_multiplier", default=1.0)
    spec = decoder_spec(
        name,
        "granite",
        keys,
        query_scale=keys.number("attention_multiplier", default=1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        embedding_scale=keys.number("embedding_multiplier", default=1.0) / residual,
        logit_scale=1 / keys.number("logits_scaling", default=1.0),
    )
    return replace(spec, norm_eps=spec.norm_eps / residual**2)


FAMILY = Family(
    title="Granite 3",
    architectures=names("Granite", "granite"),
    parse=_parse,
    special="multipliers of embeddings, residuals, scores and logits",
    gguf=("granite",),
    tools="granite",
    reasoning="granite",
)
