"""API keys: who may call, and whose turn it is. A key never leaves this file; others see its client's name."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.types import ConfigError

_OPTION = re.compile(r"(weight|name)=(\S+)")


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody who calls. `weight`: the share of tokens against other clients when requests have to wait."""

    name: str = ""
    weight: float = 1.0


ANYONE = Client()


class Keys:
    """The keys that open the server. Without any, everybody is the same client."""

    def __init__(self, keys: dict[str, Client]) -> None:
        self._keys = {key.encode(): client for key, client in keys.items()}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def total_weight(self) -> float:
        """Of all clients, each counted once."""
        return sum(client.weight for client in set(self._keys.values())) or 1.0

    def client(self, given: str | None) -> Client | None:
        """Whose key this is; None if it is nobody's. Takes as long for a wrong key as for a right one."""
        if not self._keys:
            return ANYONE
        found = None
        candidate = (given or "").encode()
        for key, client in self._keys.items():
            if hmac.compare_digest(key, candidate):
                found = client
        return found


def load_keys(flags: Sequence[str], environment: str, file: str | None) -> Keys:
    """Keys from flags, from a comma-separated variable and from a file (`KEY [weight=2] [name=team]` lines)."""
    keys: dict[str, Client] = {}
    if not all(key.strip() for key in flags):
        raise ConfigError("api_key is empty: the server would be open to everybody")
    for key in [*flags, *environment.split(",")]:
        if key.strip():
            keys[key.strip()] = Client(f"key-{len(keys)}")
    for line in _lines(file) if file is not None else ():
        key, *options = line.split()
        named = {}
        for option in options:
            if not (match := _OPTION.fullmatch(option)):
                raise ConfigError(f"{file}: {option!r} must be weight=NUMBER or name=NAME, after the key")
            named[match[1]] = match[2]
        keys[key] = Client(named.get("name", f"key-{len(keys)}"), _weight(named.get("weight", "1"), file))
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(
            "an API key has characters beyond printable ASCII, which no HTTP header carries faithfully"
        )
    return Keys(keys)


def _lines(file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file {file} cannot be read: {error}") from None
    found = [line.strip() for line in text.splitlines()]
    found = [line for line in found if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"the API key file {file} holds no key: the server would be open to everybody")
    return found


def _weight(text: str, file: str | None) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < 1e6:
        raise ConfigError(f"{file}: weight must be a number above 0, got {text!r}")
    return weight


def bearer(header: str | None, fallback: str | None) -> str | None:
    """The key in an Authorization header, or in `fallback` (x-api-key, as Anthropic's clients send it)."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else fallback
