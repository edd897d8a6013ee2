"""Answer with the weights as they are, and in 8 and 4 bits: how much memory that saves, and which answers change."""

from __future__ import annotations

import argparse

from quire import LLM, SamplingParams

PROMPT = "What is 27 + 45?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=32)
    for quantization in ("auto", "int8", "int4"):
        with LLM(args.model, quantization=quantization) as llm:
            size = llm.info.weight_bytes / 2**20
            answer = llm.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False)[0]
            print(f"{quantization}: {size:.1f} MiB of weights: {answer.outputs[0].text}")


if __name__ == "__main__":
    main()
