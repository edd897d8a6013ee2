"""Parser of the rotary part of a `config.json`: old `rope_scaling` or new `rope_parameters`, one or two bases.

`RopeDefaults` says how a family rotates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from quire.files.reading import shown
from quire.layers.rope_params import RopeParams
from quire.models.config.keys import ConfigKeys
from quire.types import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeDefaults:
    """The rotary embeddings of a family, for what a config leaves out.

    Attributes:
        theta: base of the frequencies.
        local_theta: base of windowed layers; 0: they have no parameters of their own.
        partial: rotated fraction of a head; None: a config that sets one is refused.
        interleaved: whether neighbours form a pair.
    """

    theta: float = 10000.0
    local_theta: float = 0.0
    partial: float | None = None
    interleaved: bool = False


def parse_rope(
    keys: ConfigKeys, trained_len: int, defaults: RopeDefaults, head_dim: int
) -> tuple[RopeParams, RopeParams | None]:
    """Parse the rotary parameters.

    Args:
        keys: the config.
        trained_len: context in tokens that the config states.
        defaults: those of the family.
        head_dim: head size.

    Returns:
        Parameters of all layers and None; for a family with a local base, those of global and of windowed layers.

    Raises:
        ModelError: if a value is out of range or a rule is not supported.
    """
    settings = keys.section("rope_parameters", "rope_scaling")
    nested = {k: v for k, v in settings.items() if isinstance(v, dict)}
    part = ConfigKeys({**keys.config, **settings}, keys.where).number(
        "partial_rotary_factor", default=defaults.partial or 1.0
    )
    if defaults.partial is None and part != 1.0:
        raise ModelError(
            f"partial rotary embeddings are not supported for this family (partial_rotary_factor {part:g})"
        )
    if keys.flag("rope_interleaved"):
        raise ModelError("interleaved rotary embeddings (rope_interleaved) are not supported")
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not rotary_dim:
        raise keys.refuse(
            "partial_rotary_factor", f"an even number of the {head_dim} dimensions of a head", part
        )
    theta = keys.number("rope_theta", default=defaults.theta)
    extra = {"original_max_position_embeddings": keys.get("original_max_position_embeddings", default=None)}
    local = None
    if not defaults.local_theta:
        if nested:
            raise ModelError("rope_parameters per layer type are not supported for this family")
        params = _rope({**extra, **settings}, theta, trained_len)
    else:
        local_theta = keys.number("rope_local_base_freq", default=defaults.local_theta)
        full = nested.get("full_attention", {}) if nested else settings
        params = _rope({**extra, **full}, theta, trained_len)
        local = _rope(nested.get("sliding_attention") or {}, local_theta, trained_len)

    def shaped(params: RopeParams) -> RopeParams:
        whole = rotary_dim == head_dim
        params = replace(params, rotary_dim=0 if whole else rotary_dim, interleaved=defaults.interleaved)
        for divisors in filter(None, (params.divisors, params.long_divisors)):
            if len(divisors) != rotary_dim // 2:
                raise ModelError(
                    f"{keys.where}: short_factor and long_factor must hold {rotary_dim // 2} numbers, one for each "
                    f"pair of rotated dimensions, got {len(divisors)}"
                )
        return params

    return shaped(params), local and shaped(local)


def _rope(settings: dict[str, Any], theta: float, trained_len: int) -> RopeParams:
    keys = ConfigKeys(settings, "rope parameters")
    kind = keys.text("rope_type", "type", default="default")
    theta = keys.number("rope_theta", default=theta)
    if kind in ("default", "mrope"):  # the three positions of mrope are equal for text
        return RopeParams(theta=theta, original_max_len=trained_len)
    original = keys.integer("original_max_position_embeddings", default=trained_len)
    if kind in ("longrope", "su"):  # su: the name in old configs of Phi-3
        return _longrope(keys, theta, original, trained_len)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ModelError(
            f"rope type {shown(kind)} is not supported; supported are: default, linear, dynamic, llama3, longrope, "
            "mrope, yarn"
        )
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


def _longrope(keys: ConfigKeys, theta: float, original: int, trained_len: int) -> RopeParams:
    factor = keys.number("factor", default=max(trained_len / original, 1.0))
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeParams(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_max_len=original,
        attention_factor=keys.number("attention_factor", default=default),
        divisors=keys.numbers("short_factor"),
        long_divisors=keys.numbers("long_factor"),
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
