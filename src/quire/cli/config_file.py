"""The YAML file of `quire serve --config`: its keys are flags, and its values are the values of these flags."""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from quire.cli.elsewhere import hint
from quire.cli.flags import integer
from quire.types import ConfigError


def read_config(file: str, classes: Sequence[type]) -> list[dict[str, Any]]:
    """Read the fields of several dataclasses from a YAML file.

    Returns:
        One dict for each of `classes`, with the fields that the file sets.

    Raises:
        ConfigError: if the file cannot be read, or a key or value is wrong; it names file, key and value.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the config file {file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {file} must hold flags and their values, such as `port: 8000`")
    settings: list[dict[str, Any]] = [{} for _ in classes]
    hints = [get_type_hints(cls) for cls in classes]
    known = {f.name: index for index, cls in enumerate(classes) for f in fields(cls)}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            more = f"; {known_as}" if (known_as := hint(f"--{name}")) else ""
            raise ConfigError(f"the config file {file} has {key!r}, which is no flag of quire serve{more}")
        try:
            settings[known[name]][name] = _value(hints[known[name]][name], value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"the config file {file}: {key} {error}, got {value!r}") from None
    return settings


def _value(hint: Any, value: Any) -> Any:
    """Convert a YAML value to the type of a field. Strings are parsed as the flag parses them: 32k is an integer."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        (inner,) = (a for a in get_args(hint) if a is not type(None))
        return None if value is None else _value(inner, value)
    if origin is list:
        (item,) = get_args(hint)
        return [_value(item, one) for one in (value if isinstance(value, list) else [value])]
    if hint is bool:
        return _checked(value, bool, "must be true or false")
    if hint is int:
        return integer(value) if isinstance(value, str) else _checked(value, int, "must be an integer")
    if hint is float:
        return _number(value)
    return _checked(value, str, "must be a text: put it in quotes")  # str, or a choice of texts


def _checked(value: Any, kind: type, wanted: str) -> Any:
    if type(value) is not kind:  # because bool is a subclass of int
        raise ValueError(wanted)
    return value


def _number(value: Any) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise ValueError("must be a number")
