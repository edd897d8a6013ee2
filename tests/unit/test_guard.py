"""Accepted hosts and origins: a web page must not be able to use a server on its visitor's machine."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from quire.serve.http.errors import ApiError
from quire.serve.http.guard import make_guard
from quire.serve.settings import ServeConfig

OPEN = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def allowed(
    headers: dict[str, str],
    has_keys: bool = False,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    **settings: object,
) -> bool:
    guard = make_guard(ServeConfig(**settings), has_keys)  # type: ignore[arg-type]
    try:
        guard.check({"method": method, "path": path}, Headers({"host": "localhost:8000", **headers}))
    except ApiError as error:
        assert error.status == 403
        return False
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:80", "a.localhost"]
)
def test_local_names(host: str) -> None:
    assert allowed({"host": host}) and allowed({"host": host}, allowed_hosts=["other.com"])


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "10.0.0.1",
        "[::2]",
        "",
        "localhost@evil.com",
        "a",
    ],
)
def test_other_names(host: str) -> None:
    assert not allowed({"host": host})
    assert allowed({"host": host}, has_keys=True), "the key decides"
    assert allowed({"host": host}, host="0.0.0.0"), "it may be called anything in its network"
    assert not allowed({"host": host}, has_keys=True, allowed_hosts=["good.com"])


def test_hosts_that_are_named() -> None:
    names = {"allowed_hosts": ["Good.com", "*.lan"], "host": "0.0.0.0"}
    assert allowed({"host": "good.com:80"}, **names) and allowed({"host": "box.lan"}, **names)
    assert not allowed({"host": "lan"}, **names) and not allowed({"host": "evil.com"}, **names)
    assert allowed({"host": "evil.com"}, allowed_hosts=["*"])


def test_two_hosts_or_none() -> None:
    guard = make_guard(ServeConfig(), False)
    scope = {"method": "GET", "path": "/stats"}
    guard.check(scope, Headers(raw=[]))  # HTTP/1.0; a browser always names one
    with pytest.raises(ApiError):
        guard.check(scope, Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.com")]))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.com"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://evil.com", "sec-fetch-site": "cross-site"},
        {"origin": "http://evil.com", "sec-fetch-site": "none"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", **OPEN},
    ],
)  # fmt: skip
def test_foreign_pages(headers: dict[str, str]) -> None:
    for path, method in (
        ("/v1/completions", "POST"),
        ("/stats", "GET"),
        ("/live/events", "GET"),
        ("/health", "GET"),
    ):
        assert not allowed(headers, path=path, method=method)
    assert not allowed(headers, host="0.0.0.0")
    assert not allowed(headers, allowed_origins=["http://good.com"])
    assert allowed(headers, allowed_origins=["*"]) and allowed(headers, has_keys=True)


def test_own_pages_and_programs() -> None:
    assert allowed({"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"})
    assert allowed({"origin": "http://localhost:8000"})
    assert allowed({"sec-fetch-site": "none"}) and allowed({})
    behind_proxy = {"host": "upstream", "origin": "https://llm.example.com", "sec-fetch-site": "same-origin"}
    assert allowed(behind_proxy, host="0.0.0.0")
    assert allowed(
        {"origin": "http://good.com", "sec-fetch-site": "cross-site"}, allowed_origins=["http://good.com/"]
    )


def test_a_link_may_lead_to_the_page() -> None:
    followed = {"sec-fetch-site": "cross-site", **OPEN}
    assert allowed(followed, path="/", method="GET")
    assert not allowed(followed, path="/", method="POST")
    assert not allowed({**followed, "sec-fetch-dest": "iframe"}, path="/", method="GET")
    assert not allowed({**followed, "host": "evil.com"}, path="/", method="GET")
