"""The server's OpenAPI description, and requests generated from it."""

from __future__ import annotations

import jsonschema
import pytest
from described import send
from serving import Server

from quire.serve.http.app import routes
from quire.serve.http.openapi import BODIES, describe

NO_BODY = {"/ping", "/v1/responses/{response_id}/cancel"}


def test_every_route_that_reads_is_described() -> None:
    posts = {route.path for route in routes() if "POST" in (route.methods or ())}
    assert posts - NO_BODY == set(BODIES)
    paths = describe(routes())["paths"]
    assert "/v1/models/{name}" in paths and all(
        operation["responses"] and operation["description"]
        for path in paths.values()
        for operation in path.values()
    )


def test_requests_and_answers_are_as_described(dry: Server) -> None:
    found = dry.http.get("/openapi.json").json()
    assert found["openapi"] == "3.1.0" and "/" not in found["paths"] and "/live/events" not in found["paths"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    schemas = {"components": found["components"]}
    check = jsonschema.Draft202012Validator({"$ref": "#/components/schemas/ChatRequest", **schemas})
    check.validate(body)
    assert not check.is_valid({**body, "temperature": "hot"}) and not check.is_valid({"temperature": 0})
    answer = jsonschema.Draft202012Validator({"$ref": "#/components/schemas/ChatResponse", **schemas})
    answer.validate(dry.post("/v1/chat/completions", body).json())


@pytest.mark.timeout(600)
def test_hundreds_of_requests_from_the_description(dry: Server) -> None:
    seen = send(dry.url, 20)
    assert sum(seen.values()) > 400
    statuses = {status for _, status in seen}
    assert 200 in statuses and 400 in statuses and not statuses & {500, 501, 502}
    stats = dry.wait_until_idle()
    assert stats["blocks"]["used"] == 0 and dry.http.get("/health").status_code == 200
