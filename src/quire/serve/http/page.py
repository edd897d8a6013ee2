"""`GET /` and `GET /docs`: playground with live view, and API reference, from the files in `static/`.

They need no key, because they have no data. A page gets its data from the other routes, with the key that its user
enters. Its Content-Security-Policy allows only the page's own files, so text that a model generates can never run as a
script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.serve.http.wire import json_response

_STATIC = Path(__file__).parents[1] / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGES = {"index.html": "/", "docs.html": "/docs"}
_FILES = {
    _PAGES.get(file.name, f"/static/{file.name}"): file
    for file in sorted(_STATIC.iterdir())
    if file.suffix in _TYPES
}
_ABOUT = "/static/about.json"
PAGE_PATHS = frozenset({*_FILES, _ABOUT})
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes(needs_key: bool) -> list[Route]:
    """Return a route for each file and one for about.json: the version, and whether the page must ask for a key."""

    async def about(request: Request) -> Response:
        return json_response({"version": __version__, "needs_key": needs_key}, headers=_HEADERS)

    return [
        *(Route(path, _endpoint(file), include_in_schema=False) for path, file in _FILES.items()),
        Route(_ABOUT, about, include_in_schema=False),
    ]


def _endpoint(file: Path) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that sends `file`, or 304 if the browser has it already."""
    body = file.read_bytes()
    headers = {**_HEADERS, "etag": f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'}

    async def send(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=_TYPES[file.suffix])

    return send
