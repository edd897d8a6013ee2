"""Print an answer of a running server as it arrives. Start one with `quire serve demo`."""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is 27 + 45?")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.question}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n({chunk.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main()
