"""Protection against requests from other sites' web pages, by the hosts and origins that a request names.

A browser lets any page send requests to this machine. Headers that no page can forge identify such requests:

Host                      the name of this server; after DNS rebinding, the name of the attacker's host
Origin, Sec-Fetch-Site    the site of the page that sends the request, or its relation to this server

With API keys the key decides: a page that does not know a key is refused anyway.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.types import Scope

from quire.serve.http.errors import ApiError
from quire.serve.http.page import PAGE_PATHS
from quire.serve.settings import ServeConfig

_ANY = "*"
_FOREIGN = ("cross-site", "same-site")


def is_local(name: str) -> bool:
    """Return whether a host name or address always means the local machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules by which requests are refused for their Host, Origin and Sec-Fetch-Site headers.

    `hosts` are accepted patterns such as `*.example.com`, beside local names. `origins` may call from a browser, beside
    the pages of this server.
    """

    hosts: tuple[str, ...] = (_ANY,)
    origins: frozenset[str] = frozenset({_ANY})

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError 403 for a request whose host or origin is not accepted."""
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not self._knows(_name_of(hosts[0] if hosts else "localhost")):
            shown = ", ".join(hosts)[:128]
            raise _forbidden(
                f"host {shown!r} in the Host header is not accepted; start the server with --allowed-hosts to accept it"
            )
        if self._is_foreign(headers) and not _opens_page(scope, headers):
            shown = headers.get("origin", "another site")[:128]
            raise _forbidden(
                f"requests from pages of {shown} are not accepted; "
                "start the server with --allowed-origins to accept them"
            )

    def _knows(self, name: str) -> bool:
        return is_local(name) or any(fnmatchcase(name, pattern) for pattern in self.hosts)

    def _is_foreign(self, headers: Headers) -> bool:
        """Return whether a page of an origin that is not allowed sent the request."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if _ANY in self.origins or origin in self.origins:
            return False
        if site in _FOREIGN:
            return True
        if origin is None or site == "same-origin":
            return False
        return origin.rpartition("//")[2].lower() != headers.get("host", "").lower()


def make_guard(settings: ServeConfig, has_keys: bool) -> Guard:
    """Build the guard for `settings`.

    With API keys only the Host header is checked, if --allowed-hosts is given. Without keys, a server on a loopback
    address accepts local hosts and the allowed ones; on another address it accepts any host unless --allowed-hosts is
    given.
    """
    names = tuple(name.lower().rstrip(".") for name in settings.allowed_hosts)
    if has_keys:
        return Guard(names or (_ANY,))
    hosts = names or ((settings.host.lower(),) if is_local(settings.host.lower()) else (_ANY,))
    return Guard(hosts, frozenset(origin.rstrip("/") for origin in settings.allowed_origins))


def _name_of(host: str) -> str:
    """Return a Host header's value without the port, in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Return whether the user followed a link to the web page, which contains no data."""
    opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return opens and scope["method"] in ("GET", "HEAD") and scope["path"] in PAGE_PATHS


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden")
