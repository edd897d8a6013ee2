"""Protection of a server without keys against web pages: which hosts and origins a request may name.

A browser lets any page send requests to this machine. Two headers tell them apart, for no page can forge them:

Host                      names this server. After DNS rebinding it names the attacker's host.
Origin, Sec-Fetch-Site    name the page that sends the request, or its relation to this server.

With API keys the key decides: a page that does not know one gets nowhere.
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
    """Return whether a host name or address always means the machine that uses it."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Guard:
    """Refuses requests by their Host, Origin and Sec-Fetch-Site headers.

    `hosts` are patterns such as `*.example.com`, which local names need not match. `origins` may call from a
    browser, beside the pages of this server.
    """

    hosts: tuple[str, ...] = (_ANY,)
    origins: frozenset[str] = frozenset({_ANY})

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError 403 for a request that this server should not answer."""
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not self._knows(_name_of(hosts[0] if hosts else "localhost")):
            shown = ", ".join(hosts)[:128]
            raise _forbidden(
                f"the Host header names {shown!r}, which this server does not answer to "
                "(--allowed-hosts NAME lets it)"
            )
        if self._is_foreign(headers) and not _opens_page(scope, headers):
            shown = headers.get("origin", "another site")[:128]
            raise _forbidden(
                f"a page of {shown} sent this request, and this server answers its own pages only "
                "(--allowed-origins ORIGIN lets others)"
            )

    def _knows(self, name: str) -> bool:
        return is_local(name) or any(fnmatchcase(name, pattern) for pattern in self.hosts)

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a page of another origin sent the request, and may not."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if _ANY in self.origins or origin in self.origins:
            return False
        if site in _FOREIGN:
            return True
        if origin is None or site == "same-origin":
            return False
        return origin.rpartition("//")[2].lower() != headers.get("host", "").lower()


def make_guard(settings: ServeConfig, has_keys: bool) -> Guard:
    """Return the guard for these settings: strict on a loopback address without keys, else as the flags say."""
    names = tuple(name.lower().rstrip(".") for name in settings.allowed_hosts)
    if has_keys:
        return Guard(names or (_ANY,))
    hosts = names or ((settings.host.lower(),) if is_local(settings.host.lower()) else (_ANY,))
    return Guard(hosts, frozenset(origin.rstrip("/") for origin in settings.allowed_origins))


def _name_of(host: str) -> str:
    """The host without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Whether a link elsewhere was followed to the page, which holds no data."""
    opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return opens and scope["method"] in ("GET", "HEAD") and scope["path"] in PAGE_PATHS


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden")
