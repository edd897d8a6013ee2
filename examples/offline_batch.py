"""Answer a batch of prompts without a server. All of them run at once."""

from __future__ import annotations

import argparse

from quire import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The little dog", "In the old house by the sea"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=args.max_tokens)
    with LLM(args.model) as llm:
        for result in llm.generate(PROMPTS, params, use_tqdm=False):
            print(f"{result.prompt} ...{result.outputs[0].text}\n")


if __name__ == "__main__":
    main()
