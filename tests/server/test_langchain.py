"""LangChain's OpenAI client against the demo model: chats and responses, whole and streamed, tools, structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from serving import Server

SUM, ANSWER = "What is 27 + 45?", "27 + 45 = 72"


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return '{"condition": "sunny", "temperature": 21}'


class Girl(pydantic.BaseModel):
    """A girl in a story."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str
    age: int


def make_model(demo: Server, responses: bool) -> ChatOpenAI:
    options: dict[str, Any] = {"base_url": f"{demo.url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(model="demo", temperature=0, use_responses_api=responses, **options)


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def model(demo: Server, request: pytest.FixtureRequest) -> ChatOpenAI:
    return make_model(demo, request.param)


def test_invoke(model: ChatOpenAI) -> None:
    answer = model.invoke(SUM)
    assert answer.text == ANSWER
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert model.invoke([SystemMessage("You add."), HumanMessage(SUM)]).text
    assert [answer.text for answer in model.batch([SUM] * 5)] == [ANSWER] * 5


def test_stream(model: ChatOpenAI) -> None:
    chunks = list(model.stream(SUM))
    assert len([chunk for chunk in chunks if chunk.text]) > 1
    assert "".join(chunk.text for chunk in chunks) == ANSWER


def test_async(demo: Server) -> None:
    async def run() -> None:  # one loop for both: LangChain shares its connections
        for responses in (False, True):
            model = make_model(demo, responses)
            assert "".join([chunk.text async for chunk in model.astream(SUM)]) == ANSWER
            assert [answer.text for answer in await model.abatch([SUM] * 5)] == [ANSWER] * 5

    asyncio.run(run())


@pytest.mark.parametrize("streams", [False, True])
def test_tools(model: ChatOpenAI, streams: bool) -> None:
    bound = model.bind_tools([get_weather])

    def ask(messages: list[Any]) -> Any:
        if not streams:
            return bound.invoke(messages)
        whole = AIMessageChunk("")
        for chunk in bound.stream(messages):
            whole += chunk
        return whole

    messages: list[Any] = [HumanMessage("What is the weather in Oakford?")]
    answer = ask(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oakford"})
    messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert ask(messages).text == "The weather in Oakford is sunny, with 21 degrees."


def test_a_tool_that_must_be_called(model: ChatOpenAI) -> None:
    for choice in ("any", "get_weather"):
        answer = model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False).invoke(SUM)
        assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    strict = model.bind_tools([get_weather], strict=True).invoke("What is the weather in Oakford?")
    assert strict.tool_calls[0]["args"] == {"city": "Oakford"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    question = "Tell me about a girl."
    if method == "json_mode":
        found = model.with_structured_output(None, method=method).invoke(f"{question} Answer in JSON.")
        assert isinstance(found, dict)
        return
    options: dict[str, Any] = {"strict": True} if method == "json_schema" else {}
    structured = model.with_structured_output(Girl, method=method, **options)
    assert isinstance(structured.invoke(question), Girl)
    *_, last = structured.stream(question)
    assert isinstance(last, Girl)
    plain = model.with_structured_output(Girl.model_json_schema(), method=method, include_raw=True, **options)
    found = plain.invoke(question)
    assert found["parsing_error"] is None and set(found["parsed"]) == {"name", "age"}


def test_log_probabilities(demo: Server) -> None:
    model = ChatOpenAI(
        model="demo", base_url=f"{demo.url}/v1", api_key="none", temperature=0, logprobs=True, top_logprobs=2
    )
    entries = model.invoke(SUM).response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(ANSWER)


def test_errors(demo: Server) -> None:
    model = ChatOpenAI(model="other", base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(Exception, match="not served here") as missing:
        model.invoke(SUM)
    assert getattr(missing.value, "status_code", None) == 404
    model = ChatOpenAI(model="demo", base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(ContextOverflowError, match=r"prompt has .* maximum context length"):
        model.invoke("a b " * 5000)


def test_completions_and_embeddings(demo: Server) -> None:
    options: dict[str, Any] = {"base_url": f"{demo.url}/v1", "api_key": "none", "max_retries": 0}
    text = OpenAI(model="demo", temperature=0, max_tokens=8, **options).invoke("Once upon a time")
    assert text.startswith(" there was")
    embeddings = OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False, **options)
    one, two = embeddings.embed_documents(["Once upon a time", "The end."])
    assert len(one) == len(two) == 384 and embeddings.embed_query("The end.") == pytest.approx(two, abs=1e-5)
