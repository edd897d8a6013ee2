"""Chat in the terminal. The whole conversation is sent each time; its beginning comes from the prefix cache."""

from __future__ import annotations

import argparse
import sys

from quire import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=200)
    messages: list[dict[str, str]] = []
    with LLM(args.model) as llm:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            (result,) = llm.chat(messages, params, use_tqdm=False)
            answer = result.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            print(
                f"{answer}  ({result.num_cached_tokens} of {len(result.prompt_token_ids)} prompt tokens cached)"
            )


if __name__ == "__main__":
    main()
