"""Throughput of the Llama-3.1-8B shape with random weights, converted to each format while it is loaded.

    python benchmarks/quantised_models.py [--formats plain,fp8,int4] [--workloads single,chat] [--out results.json]

Workloads are those of `quire bench`: token ids in and out, no end-of-sequence stop. Each figure is the better of two
runs, in output tokens per second; for `prefill`, prompt tokens per second.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES

from quire import LLM, SamplingParams
from quire.bench.load.workloads import WORKLOADS, shifted

VOCAB = 100_000


def run(llm: LLM, prompts: list[tuple[list[int], int]]) -> dict[str, float]:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in prompts]
    begin = time.perf_counter()
    outputs = llm.generate([tokens for tokens, _ in prompts], params, use_tqdm=False)
    spent = time.perf_counter() - begin
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"seconds": spent, "in": sum(len(tokens) for tokens, _ in prompts) / spent, "out": made / spent}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Llama-3.1-8B", choices=SHAPES)
    parser.add_argument("--formats", default="plain,fp8,fp8-block,int4")
    parser.add_argument("--workloads", default="single,chat,nano,prefill")
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "quantised_models.json"))
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.model]))
        for kind in args.formats.split(","):
            begin = time.perf_counter()
            llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
                quantization="auto" if kind == "plain" else kind,
            )  # fmt: skip
            print(f"{kind}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
            for name in args.workloads.split(","):
                runs = [run(llm, shifted(WORKLOADS[name](VOCAB, None), VOCAB, seed)) for seed in (1, 2)]
                best = min(runs, key=lambda one: one["seconds"])
                results.append({"format": kind, "workload": name, **best})
                rate = best["in"] if name == "prefill" else best["out"]
                print(f"{kind:10} {name:8} {rate:9.1f} tok/s", flush=True)
                Path(args.out).write_text(
                    json.dumps({"device": torch.cuda.get_device_name(), "results": results})
                )
            llm.close()
            del llm
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
