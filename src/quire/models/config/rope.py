"""Parser of the rotary part of a `config.json`: old `rope_scaling` or new `rope_parameters`, one or two bases."""

from __future__ import annotations

import math
from typing import Any

from quire.files.reading import shown
from quire.layers.rope_params import RopeParams
from quire.models.config.keys import ConfigKeys
from quire.types import ModelError


def parse_rope(
    keys: ConfigKeys, trained_len: int, theta: float = 10000.0, two_bases: bool = False
) -> tuple[RopeParams, RopeParams | None]:
    """Parse the rotary parameters.

    Args:
        keys: the config.
        trained_len: context in tokens that the config states.
        theta: base for a config without one.
        two_bases: whether the family's windowed layers have a base of their own.

    Returns:
        Parameters of all layers and None; with `two_bases`, those of global and of windowed layers.

    Raises:
        ModelError: if a value is out of range or a rule is not supported.
    """
    settings = keys.section("rope_parameters", "rope_scaling")
    nested = {k: v for k, v in settings.items() if isinstance(v, dict)}
    for factor in (
        keys.get("partial_rotary_factor", default=1.0),
        settings.get("partial_rotary_factor") or 1.0,
    ):
        if factor != 1.0:
            raise ModelError(
                f"partial rotary embeddings are not supported (partial_rotary_factor {shown(factor)})"
            )
    if keys.flag("rope_interleaved"):
        raise ModelError("interleaved rotary embeddings (rope_interleaved) are not supported")
    theta = keys.number("rope_theta", default=theta)
    extra = {"original_max_position_embeddings": keys.get("original_max_position_embeddings", default=None)}
    if not two_bases:
        if nested:
            raise ModelError("rope_parameters per layer type are supported for Gemma 3 only")
        return _rope({**extra, **settings}, theta, trained_len), None
    local_theta = keys.number("rope_local_base_freq", default=10000.0)
    full = nested.get("full_attention", {}) if nested else settings
    return (
        _rope(full, theta, trained_len),
        _rope(nested.get("sliding_attention") or {}, local_theta, trained_len),
    )


def _rope(settings: dict[str, Any], theta: float, trained_len: int) -> RopeParams:
    keys = ConfigKeys(settings, "rope parameters")
    kind = keys.text("rope_type", "type", default="default")
    theta = keys.number("rope_theta", default=theta)
    if kind == "default":
        return RopeParams(theta=theta, original_max_len=trained_len)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ModelError(
            f"rope type {shown(kind)} is not supported; supported are: default, linear, dynamic, llama3, yarn"
        )
    original = keys.integer("original_max_position_embeddings", default=trained_len)
    factor = keys.number("factor", default=max(trained_len / original, 1.0))
    low, high = keys.number("low_freq_factor", default=1.0), keys.number("high_freq_factor", default=4.0)
    if kind == "llama3" and low >= high:
        raise keys.refuse("high_freq_factor", f"above low_freq_factor {low:g}", high)
    return RopeParams(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=keys.number("beta_fast", default=32.0),
        beta_slow=keys.number("beta_slow", default=1.0),
        truncate=keys.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(keys, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(keys: ConfigKeys, factor: float) -> float:
    """Return the factor of cos and sin: 0.1 ln(factor) + 1 by default (YaRN, arXiv:2309.00071, section 3.4)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    above, below = keys.number("mscale", default=0), keys.number("mscale_all_dim", default=0)
    default = mscale(above) / mscale(below) if above and below else mscale(1.0)
    return keys.number("attention_factor", default=default)


def served_len(rope: RopeParams, trained_len: int, stretch: bool = True) -> int:
    """Return the longest context that can be served, in tokens.

    yarn extends the original context by `factor`. linear extends the stated one, unless that is already extended
    (`stretch` False). dynamic stays within the original context: beyond it, all angles depend on the length of the
    sequence, but keys in the cache keep their angles.
    """
    if rope.kind == "yarn":
        return max(trained_len, round(rope.original_max_len * rope.factor))
    if rope.kind == "linear" and stretch:
        return round(trained_len * rope.factor)
    return min(trained_len, rope.original_max_len) if rope.kind == "dynamic" else trained_len
