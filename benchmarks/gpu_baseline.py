"""Tokens per second on one GPU: the demo model, and large shapes with random weights.

    python benchmarks/gpu_baseline.py [--out results.json] [--models demo Qwen3-0.6B Llama-3.1-8B]

Greedy, token ids in and out, no end-of-sequence stop. `single` is one request (128 in), `batch` is 256
requests (100 to 1,024 in, 100 to 1,024 out, seed 0).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from against_transformers import SHAPES

from quire import LLM, SamplingParams

Workload = list[tuple[list[int], int]]


def single(vocab: int, tokens: int) -> Workload:
    r = random.Random(1)
    return [([r.randrange(vocab) for _ in range(128)], tokens)]


def batch(vocab: int, count: int = 256, longest: int = 1024) -> Workload:
    r = random.Random(0)
    return [
        ([r.randrange(vocab) for _ in range(r.randint(100, longest))], r.randint(100, longest))
        for _ in range(count)
    ]


def measure(llm: LLM, work: Workload) -> dict[str, float]:
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - begin
    tokens = sum(len(out.outputs[0].token_ids) for out in outputs)
    assert tokens == sum(n for _, n in work)
    first = min(out.metrics.first_token_s - out.metrics.arrival_s for out in outputs)
    return {
        "seconds": elapsed,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / elapsed,
        "first_token_s": first,
    }


def measure_once(llm: LLM, work: Workload) -> dict[str, object]:
    found = measure(llm, work)
    return {**found, "first_run_s": found["seconds"], "median_step": {}}


def best(llm: LLM, work: Workload) -> dict[str, object]:
    """The better of two runs, as the first compiles kernels and captures graphs; the first one's seconds too.

    Prompts of the second are shifted by one token id, so that no prefix is found in the cache.
    """
    first = measure(llm, work)
    second = measure(llm, [([(t + 1) % 1900 for t in ids], n) for ids, n in work])
    records = list(llm._client.engine.log)[-1000:]
    host = {
        name: sorted(getattr(r, name) for r in records)[len(records) // 2]
        for name in ("schedule_s", "launch_s", "wait_s", "retire_s")
    }
    return {
        **min(first, second, key=lambda r: r["seconds"]),
        "first_run_s": first["seconds"],
        "median_step": host,
    }


def run(name: str, tokens: int, eager: bool) -> dict[str, object]:
    settings = {"attention": "reference", "cuda_graphs": False} if eager else {}
    rounds = measure_once if eager else best
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        if name == "demo":
            llm = LLM("demo", **settings)
            work = {"single": single(1900, tokens), "batch": batch(1900, longest=512)}
        else:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
            llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, **settings)
            work = {"single": single(100_000, tokens), "batch": batch(100_000)}
        with llm:
            start_s = time.perf_counter() - begin
            measure(llm, single(1900, 8))
            found = {kind: rounds(llm, items) for kind, items in work.items()}
            info = llm.info
    torch.cuda.empty_cache()
    print(f"{name:<14}start {start_s:.1f} s  " + "  ".join(
        f"{kind} {f['output_tokens_per_s']:,.0f} tok/s ({f['seconds']:.2f} s, first {f['first_run_s']:.2f} s) "
        + " ".join(f"{k[:-2]} {v * 1e6:.0f}us" for k, v in f["median_step"].items()) for kind, f in found.items()
    ), flush=True)  # fmt: skip
    return {"model": name, "start_s": start_s, "phases_s": info.phases_s, "pages": info.num_blocks, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo", "Qwen3-0.6B", "Llama-3.1-8B"])
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of `single`")
    parser.add_argument(
        "--eager", action="store_true", help="plain torch attention, no graphs: the baseline; one run each"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "runs": []}
    for name in args.models:
        results["runs"].append(run(name, args.tokens, args.eager))
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
