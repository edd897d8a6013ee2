"""Split a model over several GPUs, or over processes of a CPU where there are none: the answers stay the same."""

from __future__ import annotations

import argparse

from quire import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="in float32 the answers are equal token by token")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=24)
    answers = []
    for ranks in (1, args.ranks):
        with LLM(args.model, tensor_parallel_size=ranks, dtype=args.dtype) as llm:
            answers.append(llm.generate(["Once upon a time"], params, use_tqdm=False)[0].outputs[0].text)
            print(f"{ranks} rank(s): Once upon a time{answers[-1]}")
    print("equal" if answers[0] == answers[1] else "different")


if __name__ == "__main__":
    main()
