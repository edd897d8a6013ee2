"""API keys and the clients that own them. Keys never leave this module; other code sees the client's name."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from quire.types import ConfigError, RequestTargets

_OPTION = re.compile(r"(weight|name|target_itl|target_ttft)=(\S+)|(admin)")


@dataclass(frozen=True, slots=True)
class ApiClient:
    """A caller of the API, identified by its name. It owns its requests, stored responses and cached prefixes.

    `weight` is its share of the tokens while requests wait. An `admin` may see the requests of every client. `targets` are
    those of its requests without targets of their own.
    """

    name: str = ""
    weight: float = 1.0
    admin: bool = False
    targets: RequestTargets = RequestTargets()

    @property
    def sees(self) -> str | None:
        """Return the name of the client whose requests it may see, or None for all clients."""
        return None if self.admin else self.name


ANYONE = ApiClient(admin=True)  # every caller of a server without keys


class ApiKeys:
    """The accepted API keys. Without keys, every caller is `ANYONE`.

    Keys are stored and looked up as digests keyed with a secret of this process, so the time of a lookup does not
    reveal how much of a wrong key was correct.
    """

    def __init__(self, keys: dict[str, ApiClient]) -> None:
        self._secret = secrets.token_bytes(32)
        self._clients = {self._digest(key): client for key, client in keys.items()}

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of all clients, each counted once."""
        return sum(client.weight for client in set(self._clients.values())) or 1.0

    def client(self, given: str | None) -> ApiClient | None:
        """Return the client that owns key `given`, or None if the server does not accept it."""
        return self._clients.get(self._digest(given or "")) if self._clients else ANYONE

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode(), digest_size=32, key=self._secret).digest()


def load_keys(flags: Sequence[str], environment: str, file: str | None) -> ApiKeys:
    """Read the keys from `--api-key`, from the environment and from a key file.

    A line of the file is `KEY [name=team] [weight=2] [target_itl=40] [target_ttft=500] [admin]`, targets in ms. Lines with the same name are keys of one client. A key
    without a name gets a separate client, named by a digest of the key.

    Args:
        flags: values of `--api-key`.
        environment: value of QUIRE_API_KEY: keys separated by commas.
        file: path of the key file, or None.

    Raises:
        ConfigError: for a key that occurs twice, is empty, or cannot be sent in a header, and for lines that contradict
            each other. The message never contains a key.
    """
    if not all(key.strip() for key in flags):
        raise ConfigError("api_key must not be empty: without a key, anyone could call the server")
    keys: dict[str, ApiClient] = {}
    sources: dict[str, str] = {}
    for source, key, client in _entries(flags, environment, file):
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "an API key contains characters other than printable ASCII, which HTTP headers cannot carry reliably"
            )
        if key in keys:
            where = source if source == sources[key] else f"{sources[key]} and in {source}"
            raise ConfigError(f"the same API key is given twice, in {where}: each key belongs to one client")
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
    """Return the name of a key without a name: stable over restarts, and too short to recover the key from."""
    return "key-" + blake2b(key.encode(), digest_size=5, person=b"quire api key").hexdigest()


def _client(key: str, options: Sequence[str], file: str | None) -> ApiClient:
    given: dict[str, str] = {}
    for option in options:
        if not (match := _OPTION.fullmatch(option)):
            raise ConfigError(
                f"{file}: {option!r} after a key must be weight=NUMBER, name=NAME, target_itl=MS, target_ttft=MS or admin"
            )
        name, value = (match[1], match[2]) if match[1] else (match[3], "")
        if name in given:
            raise ConfigError(f"{file}: {name} is given twice for one key")
        given[name] = value
    name = given.get("name", "") or _name_of(key)
    if not name.isprintable():
        raise ConfigError(f"{file}: name={name!r} must consist of printable characters")
    weight = _number("weight", given.get("weight", "1"), file)
    ttft_s, itl_s = (
        _number(key, given[key], file) / 1e3 if key in given else math.inf
        for key in ("target_ttft", "target_itl")
    )
    return ApiClient(name, weight, "admin" in given, RequestTargets(itl_s, ttft_s))


def _check_names(keys: dict[str, ApiClient]) -> None:
    """Raise ConfigError unless all keys with the same name have the same weight and rights."""
    found: dict[str, ApiClient] = {}
    for client in keys.values():
        if found.setdefault(client.name, client) != client:
            raise ConfigError(
                f"the API keys named {client.name!r} belong to one client: give them the same weight "
                "and targets, and admin to all of them or none"
            )


def _lines(file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file {file} cannot be read: {error}") from None
    found = [line.strip() for line in text.splitlines()]
    found = [line for line in found if line and not line.startswith("#")]
    if not found:
        raise ConfigError(
            f"the API key file {file} contains no key: without a key, anyone could call the server"
        )
    return found


def _number(option: str, text: str, file: str | None) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise ConfigError(f"{file}: {option} must be between 0 and 1000000, both excluded, got {text!r}")
    return number


def bearer(header: str | None, fallback: str | None) -> str | None:
    """Return the key in an Authorization header, otherwise `fallback` (the x-api-key header of Anthropic clients)."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else fallback
