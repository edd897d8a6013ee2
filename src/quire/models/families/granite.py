"""Granite 3 (dense).

The stream is scaled instead of what each half adds: with x = m y, x + m f(norm(x)) becomes y + f(norm(y)). A norm
divides by the size of its input, so it only needs an epsilon of eps / m^2, and the embeddings start at 1 / m.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def multipliers(keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields of the spec that hold multipliers."""
    return {
        "query_scale": keys.number("attention_multiplier", default=1.0),
        "embedding_scale": keys.number("embedding_multiplier", default=1.0) / _residual(keys),
        "logit_scale": 1 / keys.number("logits_scaling", default=1.0),
    }


def with_scaled_stream(spec: ModelSpec, keys: ConfigKeys) -> ModelSpec:
    """Return the spec with the epsilon of norms for a stream that is divided by the multiplier."""
    return replace(spec, norm_eps=spec.norm_eps / _residual(keys) ** 2)


def _residual(keys: ConfigKeys) -> float:
    return keys.number("residual_multiplier", default=1.0)


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    mlp_bias = keys.flag("mlp_bias")
    spec = decoder_spec(
        name, "granite", keys, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, **multipliers(keys)
    )
    return with_scaled_stream(spec, keys)


FAMILY = Family(
    title="Granite 3",
    architectures=names("Granite", "granite"),
    parse=_parse,
    special="multipliers of embeddings, residuals, scores and logits",
    gguf=("granite",),
    tools="granite",
    reasoning="granite",
)
