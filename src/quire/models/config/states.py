"""Parts of the `config.json` parser that families with states share."""

from __future__ import annotations

from typing import Any

from quire.layers.mixer_params import StateSpaceParams
from quire.models.config.keys import ConfigKeys


def state_space(
    keys: ConfigKeys, inner: int, heads: int, groups: int, state_dim: int, **fields: Any
) -> StateSpaceParams:
    """Parse Mamba-2 in the spelling of Bamba, Granite and Falcon-H1.

    Args:
        keys: the config.
        inner: width of x.
        heads, groups, state_dim: defaults of the family.
        **fields: further fields of the parameters.

    Raises:
        ModelError: if a field has a bad value.
    """
    count = keys.integer("mamba_n_heads", default=heads)
    if inner % count:
        raise keys.refuse("mamba_n_heads", f"a divisor of the {inner} channels of the state space", count)
    dim = inner // count
    if keys.get("mamba_d_head", default="auto") not in ("auto", dim):
        raise keys.refuse(
            "mamba_d_head", f"{dim}, the {inner} channels by {count} heads", keys.get("mamba_d_head")
        )
    return StateSpaceParams(
        heads=count,
        head_dim=dim,
        groups=checked_groups(keys, "mamba_n_groups", count, groups),
        state_dim=keys.integer("mamba_d_state", default=state_dim),
        width=keys.integer("mamba_d_conv", default=4, minimum=2),
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        proj_bias=keys.flag("mamba_proj_bias"),
        step_limits=step_limits(keys),
        **fields,
    )


def checked_groups(keys: ConfigKeys, name: str, heads: int, default: int) -> int:
    """Return the number of groups of heads, which must divide `heads`."""
    groups = keys.integer(name, default=default)
    if heads % groups:
        raise keys.refuse(name, f"a divisor of {heads} heads", groups)
    return groups


def step_limits(keys: ConfigKeys) -> tuple[float, float]:
    """Return the smallest and largest time step; transformers writes infinity as an object."""
    low, high = keys.get("time_step_limit", default=[0.0, float("inf")])
    high = float(high["__float__"]) if isinstance(high, dict) else float(high)
    if not 0 <= float(low) < high:
        raise keys.refuse("time_step_limit", "two numbers, the smaller first", [low, high])
    return float(low), high
