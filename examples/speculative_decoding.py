"""Decode the same prompts with and without speculation: the answers are equal, the time is not."""

from __future__ import annotations

import argparse
import time
from typing import Any

from quire import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The little dog"]


def answers(model: str, params: SamplingParams, **settings: Any) -> tuple[list[str], float]:
    """Return the answers to the prompts, and the seconds that they took."""
    with LLM(model, **settings) as llm:
        llm.generate(PROMPTS[:1], params, use_tqdm=False)  # compiles kernels
        begin = time.perf_counter()
        done = llm.generate(PROMPTS, params, use_tqdm=False)
        return [one.outputs[0].text for one in done], time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="demo-draft", help="a small model with the same tokenizer")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
    plain, plain_s = answers(args.model, params)
    ways = {"ngram": {"spec_method": "ngram"}, "draft": {"spec_method": "draft", "spec_model": args.draft}}
    for name, settings in ways.items():
        found, took_s = answers(args.model, params, **settings)
        print(f"{name}: {'the same' if found == plain else 'other'} answers, {plain_s / took_s:.2f}x as fast")


if __name__ == "__main__":
    main()
