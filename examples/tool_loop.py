"""Let the model call functions until it answers. Start a server with `quire serve demo`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

MOST_ROUNDS = 5


def get_weather(city: str) -> dict[str, Any]:
    return {"condition": "sunny", "temperature": 15 + len(city)}


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the weather in Oakford?")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": args.question}]
    for _ in range(MOST_ROUNDS):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
        message = answer.choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message)
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})


if __name__ == "__main__":
    main()
