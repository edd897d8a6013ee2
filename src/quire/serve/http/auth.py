"""API keys: who may call, and whose request it is. A key never leaves this file; others see its client's name."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from quire.types import ConfigError

_OPTION = re.compile(r"(weight|name)=(\S+)|(admin)")


@dataclass(frozen=True, slots=True)
class ApiClient:
    """A caller, known by its name: requests, stored responses and cached prefixes belong to it.

    `weight`: its share of the tokens when requests have to wait. `admin`: it may see the requests of all.
    """

    name: str = ""
    weight: float = 1.0
    admin: bool = False

    @property
    def sees(self) -> str | None:
        """The name of the client whose requests it may see; None: those of all."""
        return None if self.admin else self.name


ANYONE = ApiClient(admin=True)  # every caller of a server without keys


class ApiKeys:
    """The keys that open the server. Without any, every caller is `ANYONE`.

    Keys are held and looked up as digests under a secret of this process, so the time of a lookup tells nothing about
    how much of a wrong key was right.
    """

    def __init__(self, keys: dict[str, ApiClient]) -> None:
        self._secret = secrets.token_bytes(32)
        self._clients = {self._digest(key): client for key, client in keys.items()}

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def total_weight(self) -> float:
        """The weight of all clients, each counted once."""
        return sum(client.weight for client in set(self._clients.values())) or 1.0

    def client(self, given: str | None) -> ApiClient | None:
        """Return the client of a key, or None if it is no key of this server."""
        return self._clients.get(self._digest(given or "")) if self._clients else ANYONE

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode(), digest_size=32, key=self._secret).digest()


def load_keys(flags: Sequence[str], environment: str, file: str | None) -> ApiKeys:
    """Read the keys of `--api-key`, of the comma-separated QUIRE_API_KEY and of a key file.

    A line of the file is `KEY [name=team] [weight=2] [admin]`. Lines with the same name are keys of one client. A key
    without a name is a client of its own, named by a digest of the key.

    Raises:
        ConfigError: for a key that occurs twice, is empty, or cannot be sent in a header, and for lines that contradict
            each other. The message never holds a key.
    """
    if not all(key.strip() for key in flags):
        raise ConfigError("api_key is empty: the server would be open to everybody")
    keys: dict[str, ApiClient] = {}
    sources: dict[str, str] = {}
    for source, key, client in _entries(flags, environment, file):
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "an API key has characters beyond printable ASCII, which no HTTP header carries faithfully"
            )
        if key in keys:
            where = source if source == sources[key] else f"{sources[key]} and in {source}"
            raise ConfigError(f"an API key is given twice, in {where}: each key belongs to one client")
        keys[key], sources[key] = client, source
    _check_names(keys)
    return ApiKeys(keys)


def _entries(
    flags: Sequence[str], environment: str, file: str | None
) -> Iterator[tuple[str, str, ApiClient]]:
    """Yield the source of each key, the key, and its client."""
    for source, keys in (("--api-key", flags), ("QUIRE_API_KEY", environment.split(","))):
        for key in filter(None, map(str.strip, keys)):
            yield source, key, ApiClient(_name_of(key))
    for line in _lines(file) if file is not None else ():
        key, *options = line.split()
        yield f"the API key file {file}", key, _client(key, options, file)


def _name_of(key: str) -> str:
    """Return the name of a key that was given none: stable over restarts, and of no use for finding the key."""
    return "key-" + blake2b(key.encode(), digest_size=5, person=b"quire api key").hexdigest()


def _client(key: str, options: Sequence[str], file: str | None) -> ApiClient:
    given: dict[str, str] = {}
    for option in options:
        if not (match := _OPTION.fullmatch(option)):
            raise ConfigError(f"{file}: {option!r} must be weight=NUMBER, name=NAME or admin, after the key")
        name, value = (match[1], match[2]) if match[1] else (match[3], "")
        if name in given:
            raise ConfigError(f"{file}: {name} is given twice for one key")
        given[name] = value
    name = given.get("name", "") or _name_of(key)
    if not name.isprintable():
        raise ConfigError(f"{file}: name={name!r} must consist of printable characters")
    return ApiClient(name, _weight(given.get("weight", "1"), file), "admin" in given)


def _check_names(keys: dict[str, ApiClient]) -> None:
    """Raise ConfigError unless all keys of a name agree on its client."""
    found: dict[str, ApiClient] = {}
    for client in keys.values():
        if found.setdefault(client.name, client) != client:
            raise ConfigError(
                f"the API keys named {client.name!r} are one client: give all of them the same weight, "
                "and admin to all or none"
            )


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
