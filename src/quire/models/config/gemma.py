"""Parts of the configurations of Gemma 3n and Gemma 4."""

from __future__ import annotations

from typing import Any

from quire.models.config.keys import ConfigKeys
from quire.types import ModelError


def with_defaults(keys: ConfigKeys, defaults: dict[str, Any]) -> ConfigKeys:
    """Return the config with `defaults` where it has no value."""
    present = {key: value for key, value in keys.config.items() if value is not None}
    return ConfigKeys({**keys.config, **defaults, **present}, keys.where)


def layer_kinds(keys: ConfigKeys, every: int) -> list[str]:
    """Return the attention kind of each layer: by default, every `every`-th one has no window."""
    layers = keys.integer("num_hidden_layers")
    kinds = keys.entries("layer_types", str) or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    if len(kinds) != layers:
        raise keys.refuse("layer_types", f"a list of {layers} entries, one for each layer", kinds)
    return kinds


def kv_sources(keys: ConfigKeys, kinds: list[str]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads.

    The last `num_kv_shared_layers` layers read those of the last layer in front of them of the same kind.

    Raises:
        ModelError: if there is no such layer.
    """
    shared = keys.integer("num_kv_shared_layers", minimum=0)
    first = len(kinds) - shared
    last = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if missing := set(kinds) - set(last):
        raise ModelError(
            f"{keys.where}: num_kv_shared_layers {shared} leaves no layer of kind {missing.pop()} with its own "
            "keys and values"
        )
    return tuple(index if index < first else last[kind] for index, kind in enumerate(kinds))


def layer_rope(keys: ConfigKeys, kind: str, default: dict[str, Any]) -> ConfigKeys:
    """Return the rotary parameters of the layers of one kind."""
    settings = keys.section("rope_parameters", "rope_scaling").get(kind)
    if settings is not None and not isinstance(settings, dict):
        raise keys.refuse(f"rope_parameters.{kind}", "an object", settings)
    return ConfigKeys({**default, **(settings or {})}, f"rope parameters of {kind}")
