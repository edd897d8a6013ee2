"""Find the text that is nearest to a question. Embeddings have length 1, so their product is the cosine."""

from __future__ import annotations

import argparse

import numpy as np

from quire import LLM

TEXTS = [
    "The weather in Oakford is sunny, with 21 degrees.",
    "27 + 45 = 72",
    "Once upon a time there was a little dog who lived by the sea.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query", nargs="?", default="12 + 30 = 42")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    with LLM(args.model) as llm:
        vectors = np.array(llm.embed([*TEXTS, args.query], use_tqdm=False))
    scores = vectors[:-1] @ vectors[-1]
    for index in np.argsort(-scores):
        print(f"{scores[index]:.3f}  {TEXTS[index]}")


if __name__ == "__main__":
    main()
