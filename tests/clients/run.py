"""Client libraries at their default settings against a running server; those that are not installed are skipped.

python tests/clients/run.py http://localhost:8000 [CLIENT ...]

Each trial asks the demo model for a sum, a tool call or a structured answer and raises if the client does not return
it. Codex CLI, found as `codex` on the PATH, sends about 10,000 tokens. Its trial needs as long a context, which a dry
run over a folder with a larger `max_position_embeddings` has, and checks only that a turn ends.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "demo"
SUM, ANSWER = "What is 27 + 45?", "72"
ASK = "What is the weather in Oakford?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TELLS = "Get the current weather in a city."
CODEX_S = 300


def try_openai(url: str, model: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": SUM}]
    stream = client.chat.completions.create(model=model, messages=asked, temperature=0, stream=True)
    assert ANSWER in "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    talk = client.conversations.create()
    tools: Any = [
        {"type": "function", "name": "get_weather", "description": TELLS, "parameters": CITY},
        {"type": "web_search"},
    ]
    options: Any = {"model": model, "tools": tools, "conversation": talk.id, "temperature": 0}
    (call,) = client.responses.create(input=ASK, **options).output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"condition": "sunny"}'}
    assert "sunny" in client.responses.create(input=[result], **options).output_text
    assert len(client.conversations.items.list(talk.id).data) == 4
    response = client.responses.create(model=model, input=SUM, temperature=0)
    *_, last = client.responses.retrieve(response.id, stream=True)
    assert last.type == "response.completed"
    assert client.responses.input_items.list(response.id).data[0].content[0].text == SUM
    counted = client.responses.input_tokens.count(model=model, input=SUM).input_tokens
    assert counted == response.usage.input_tokens
    return "chat stream, responses, conversation, replay, count"


def try_anthropic(url: str, model: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools: Any = [
        {"name": "get_weather", "description": TELLS, "input_schema": CITY},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    asked: Any = [{"role": "user", "content": ASK}]
    with client.messages.stream(
        model=model, max_tokens=100, messages=asked, tools=tools, extra_body={"temperature": 0}
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and message.content[0].input == {"city": "Oakford"}
    return "streamed tool call beside a server tool"


def try_langchain(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0)
    assert ANSWER in chat.invoke(SUM).content
    tool = {"type": "function", "function": {"name": "get_weather", "description": TELLS, "parameters": CITY}}
    (call,) = chat.bind_tools([tool]).invoke(ASK).tool_calls
    assert call["args"] == {"city": "Oakford"}
    return "chat, tool call"


def try_instructor(url: str, model: str) -> str:
    import instructor
    import openai
    import pydantic

    class Weather(pydantic.BaseModel):
        city: str

    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))
    found = client.chat.completions.create(
        model=model, response_model=Weather, messages=[{"role": "user", "content": ASK}], temperature=0
    )
    assert found.city
    return "forced tool as a model"


def try_pydantic_ai(url: str, model: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(model, provider=provider), model_settings={"temperature": 0})

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        return json.dumps({"condition": "sunny", "temperature": 21})

    assert "sunny" in str(agent.run_sync(ASK).output)
    return "tool call and answer"


def try_openai_agents(url: str, model: str) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        return json.dumps({"condition": "sunny", "temperature": 21})

    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        agent = agents.Agent(
            name="assistant",
            model=agents.OpenAIResponsesModel(model, client),
            tools=[get_weather],
            model_settings=agents.ModelSettings(temperature=0),
        )
        return str((await agents.Runner.run(agent, ASK)).final_output)

    assert "sunny" in asyncio.run(run())
    return "responses, tool call and answer"


def try_litellm(url: str, model: str) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download at import
    import litellm

    asked = [{"role": "user", "content": SUM}]
    for name, base in ((f"openai/{model}", f"{url}/v1"), (f"anthropic/{model}", url)):
        found = litellm.completion(model=name, api_base=base, api_key="none", messages=asked, temperature=0)
        assert ANSWER in found.choices[0].message.content
    return "chat through both APIs"


def try_codex(url: str, model: str) -> str:
    codex = shutil.which("codex")
    if codex is None:
        raise ImportError
    with tempfile.TemporaryDirectory() as home:
        provider = f'name = "quire"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        text = f'model = "{model}"\nmodel_provider = "quire"\n[model_providers.quire]\n{provider}'
        Path(home, "config.toml").write_text(text)
        done = subprocess.run(
            [codex, "exec", "--skip-git-repo-check", "--json", SUM],
            env={
                "CODEX_HOME": home,
                "PATH": f"{Path(codex).parent}:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
            },
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CODEX_S,
        )
    kinds = [json.loads(line)["type"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and "turn.completed" in kinds, done.stdout[-500:]
    return "a turn with its default tools"


TRIALS: dict[str, Callable[[str, str], str]] = {
    "openai": try_openai,
    "anthropic": try_anthropic,
    "langchain-openai": try_langchain,
    "instructor": try_instructor,
    "pydantic-ai-slim": try_pydantic_ai,
    "openai-agents": try_openai_agents,
    "litellm": try_litellm,
    "@openai/codex": try_codex,
}


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def main(url: str, names: list[str]) -> int:
    """Run the trials of these names, or all, print a table, and return the number of failures."""
    failed = 0
    print(f"{'client':18} {'version':10} {'result':8} {'s':>6}  trial")
    for name, trial in TRIALS.items():
        if names and name not in names:
            continue
        began = time.monotonic()
        try:
            result, note = "passed", trial(url, MODEL)
        except ImportError:
            result, note = "absent", "not installed"
        except Exception as error:
            result, note = "FAILED", f"{type(error).__name__}: {str(error)[:200]}"
            failed += 1
        print(
            f"{name:18} {version_of(name):10} {result:8} {time.monotonic() - began:6.1f}  {note}", flush=True
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/"), sys.argv[2:]))
