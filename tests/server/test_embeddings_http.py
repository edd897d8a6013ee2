"""POST /v1/embeddings through the OpenAI client, compared with embeddings computed in this process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from serving import Check, Server, serving

from quire import LLM

PATH = "/v1/embeddings"
TEXTS = ["Rosa has an orange rabbit.", "Vera met Rosa at the cinema.", "What is 27 + 45?"]


@pytest.fixture
def client(demo: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reference() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", device="cpu") as llm:
        yield llm


def vectors(response: Any) -> np.ndarray:
    return np.array([entry.embedding for entry in response.data])


def test_the_client(client: openai.OpenAI, reference: LLM) -> None:
    expected = np.array(reference.embed(TEXTS, use_tqdm=False))
    response = client.embeddings.create(model="demo", input=TEXTS)
    assert response.object == "list" and response.model == "demo"
    assert [entry.index for entry in response.data] == [0, 1, 2]
    assert response.usage.prompt_tokens == response.usage.total_tokens > 10
    np.testing.assert_allclose(vectors(response), expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors(response), axis=1), 1, atol=1e-6)
    floats = client.embeddings.create(model="demo", input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(vectors(floats)[0], expected[0], atol=1e-6)
    ids = [reference.get_tokenizer().encode(text) for text in TEXTS]
    np.testing.assert_allclose(
        vectors(client.embeddings.create(model="demo", input=ids)), expected, atol=1e-5
    )
    one = client.embeddings.create(model="demo", input=ids[1])
    np.testing.assert_allclose(vectors(one), expected[1:2], atol=1e-5)


def test_pooling_dimensions_and_length(client: openai.OpenAI, reference: LLM) -> None:
    whole = np.array(reference.embed(TEXTS, "last", use_tqdm=False))
    last = client.embeddings.create(model="demo", input=TEXTS, extra_body={"pooling": "last"})
    np.testing.assert_allclose(vectors(last), whole, atol=1e-5)
    few = vectors(
        client.embeddings.create(model="demo", input=TEXTS, dimensions=16, extra_body={"pooling": "last"})
    )
    cut = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(few, cut, atol=1e-5)
    raw = client.embeddings.create(model="demo", input=TEXTS, extra_body={"normalize": False})
    expected = np.array(reference.embed(TEXTS, normalize=False, use_tqdm=False))
    np.testing.assert_allclose(vectors(raw), expected, atol=1e-4)


def test_as_described(demo: Server, check: Check) -> None:
    body = {"model": "demo", "input": TEXTS, "user": "me", "encoding_format": "float"}
    floats = demo.post(PATH, body).json()
    check(floats, "CreateEmbeddingResponse")
    texts = demo.post(PATH, {**body, "encoding_format": "base64"}).json()
    for one, other in zip(floats["data"], texts["data"]):
        numbers = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        np.testing.assert_allclose(numbers, one["embedding"], atol=1e-6)


def test_many_at_once_and_beside_chats(demo: Server, reference: LLM) -> None:
    """Several requests together hold more inputs than the engine runs at once."""
    texts = [f"On Monday, {name} bought {n} oranges." for name in ("Rosa", "Vera") for n in range(200)]
    expected = np.array(reference.embed(texts, use_tqdm=False))

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
            question: Any = [{"role": "user", "content": "What is 27 + 45?"}]
            chats = [
                client.chat.completions.create(model="demo", messages=question, temperature=0)
                for _ in range(8)
            ]
            parts = [
                client.embeddings.create(model="demo", input=texts[i : i + 50]) for i in range(0, 400, 50)
            ]
            return await asyncio.gather(*parts, *chats)

    found_all = asyncio.run(run())
    found = np.concatenate([vectors(part) for part in found_all[:8]])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert {chat.choices[0].message.content for chat in found_all[8:]} == {"27 + 45 = 72"}
    assert demo.wait_until_idle()["blocks"]["used"] == 0


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"input": None}, "input", "input"),
        ({"input": []}, "input is empty", "input"),
        ({"input": ""}, "empty", None),
        ({"input": ["a", 5]}, "input must hold either", "input"),
        ({"input": [10**6]}, "vocabulary", None),
        ({"input": ["a"] * 2049}, "at most 2048", "input"),
        ({"input": "a " * 9000}, "max_model_len", None),
        ({"encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"dimensions": 0}, "dimensions", "dimensions"),
        ({"dimensions": 10**6}, "at most 32", "dimensions"),
        ({"pooling": "middle"}, "pooling must be mean or last", "pooling"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt"),
        ({"timeout": -1}, "timeout", "timeout"),
    ],
)
def test_what_is_refused(
    dry: Server, check: Check, fields: dict[str, Any], says: str, param: str | None
) -> None:
    response = dry.post(PATH, {"model": "demo", "input": "Hi"} | fields)
    assert response.status_code == 400, response.text
    check(response.json(), "ErrorResponse")
    assert says in response.json()["error"]["message"]
    assert param is None or response.json()["error"]["param"] == param


def test_without_a_model(dry: Server) -> None:
    """The dry run returns vectors too: equal for equal texts, and of length 1."""
    found = [
        dry.post(PATH, {"input": ["a b", "a b", "c"], "pooling": p}).json()["data"] for p in ("mean", "last")
    ]
    for data in found:
        a, b, c = (np.array(entry["embedding"]) for entry in data)
        assert np.array_equal(a, b) and not np.allclose(a, c) and np.linalg.norm(a) == pytest.approx(1)
    assert dry.post(PATH, {"input": "Hi", "nonsense": 1}).json()["warnings"]
    assert dry.post(PATH, {"input": "a " * 9000, "truncate_prompt_tokens": -1}).status_code == 200


def test_the_pooling_of_a_server() -> None:
    with serving("demo", "--dry-run", "--pooling", "last") as server:
        found = [server.post(PATH, {"input": "a b", **f}).json()["data"] for f in ({}, {"pooling": "last"})]
        assert found[0] == found[1]
    with pytest.raises(RuntimeError, match="pooling must be"), serving("demo", "--dry-run", "--pooling", "x"):
        pass
