"""Anything at all in any field: never a 5xx, never a hang, nothing left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Server

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.completions import CompletionRequest
from quire.serve.api.protocol.embeddings import EmbeddingsRequest
from quire.serve.api.protocol.messages import CountTokensRequest, MessagesRequest
from quire.serve.api.protocol.other import DetokenizeRequest, GenerateRequest, TokenizeRequest
from quire.serve.api.protocol.responses import ResponsesRequest
from quire.serve.http.wire import field_names

ROUTES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    20,
    255,
    2047,
    2048,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**40,
    0.5,
    1e-300,
    1e300,
    -0.0,
]
TEXTS = ["", "a", "user", "auto", "json_object", "\x00", "\u202e", "🙂", "{{", "(a+)+$", "x" * 3000]
scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.integers(),
    st.text(max_size=20),
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "schema", "json_schema", "5", "json"]
)
value = st.recursive(
    scalar,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
GOOD = {
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "input": "Hi",
    "tokens": [5, 6],
    "max_tokens": 4,
}


@st.composite
def bodies(draw: Any) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(ROUTES)))
    names = sorted(field_names(ROUTES[path]))
    body = {name: GOOD[name] for name in GOOD if name in names}
    if "messages" in body and "prompt" in body:
        del body["messages"]
    if "input" in body:
        body.pop("prompt", None)  # something else there
    body |= draw(st.dictionaries(st.sampled_from(names), value, max_size=4))
    return path, body


@pytest.mark.timeout(600)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=bodies())
def test_any_value_in_any_field(dry: Server, case: tuple[str, dict[str, Any]]) -> None:
    path, body = case
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = dry.post_bytes(path, content, timeout=30)
    assert answer.status_code < 500 or (answer.status_code == 504 and body.get("timeout")), (
        body,
        answer.text,
    )
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=200), path=st.sampled_from(sorted(ROUTES)))
def test_any_bytes(dry: Server, body: bytes, path: str) -> None:
    assert 400 <= dry.post_bytes(path, body).status_code < 500


def test_nothing_is_left(dry: Server) -> None:
    assert dry.wait_until_idle()["blocks"]["used"] == 0
    assert dry.http.get("/health").status_code == 200
