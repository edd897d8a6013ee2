"""Answer questions about passages that a search has found.

The passages come first in each prompt, in the same order. Their keys and values are computed for the first question
and come from the prefix cache for the others.
"""

from __future__ import annotations

import argparse

import numpy as np

from quire import LLM, SamplingParams

LIBRARY = [
    "Oakford lies at the river. Its market is open on Mondays.",
    "Westbrook has a harbour with forty boats, and a lighthouse from 1820.",
    "The bakery in Oakford sells bread, cakes and apple pies.",
    "Trains leave Westbrook every hour. The last one leaves at ten.",
]
TOPIC = "shops and markets in Oakford"
QUESTIONS = ["When is the market open?", "What does the bakery sell?", "Where does Oakford lie?"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=40)
    with LLM(args.model) as llm:
        vectors = np.array(llm.embed([*LIBRARY, TOPIC], use_tqdm=False))
        nearest = sorted(np.argsort(-(vectors[:-1] @ vectors[-1]))[:3])
        passages = "\n".join(LIBRARY[index] for index in nearest)
        system = {"role": "system", "content": f"Answer from these passages:\n{passages}"}
        for question in QUESTIONS:
            chat = [system, {"role": "user", "content": question}]
            (result,) = llm.chat(chat, params, use_tqdm=False)
            print(f"{question}  {result.outputs[0].text}")
            print(f"  {result.num_cached_tokens} of {len(result.prompt_token_ids)} prompt tokens cached")


if __name__ == "__main__":
    main()
