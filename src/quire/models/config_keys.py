"""`Keys`: typed look-ups in a `config.json`, where one fact may go by several names."""

from __future__ import annotations

from typing import Any

from quire.types import ModelError

_MISSING: Any = object()


class Keys:
    """Typed look-ups in a config; a key may have several spellings, the first present one counts."""

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self.config = config
        self.where = where

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is _MISSING:
            raise ModelError(f"{self.where} lacks {names[0]}")
        return default

    def integer(self, *names: str, default: Any = _MISSING) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: {names[0]} must be a positive integer, got {value!r}")
        return value

    def number(self, *names: str, default: Any = _MISSING) -> float:
        value = self.get(*names, default=default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"{self.where}: {names[0]} must be a number, got {value!r}")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        return bool(self.get(*names, default=default))

    def has(self, *names: str) -> bool:
        return any(name in self.config for name in names)
