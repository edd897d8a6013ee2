"""Throughput of a model's shape with random weights, converted to each format while it is loaded.

    python benchmarks/quantised_models.py [--formats plain,fp8,int4] [--workloads single,chat] [--out results.json]
    python benchmarks/quantised_models.py --formats fp8 --kv-cache-dtype fp8 --workloads nano,chat
    python benchmarks/quantised_models.py --model Qwen3-30B-A3B --formats fp8-block --workloads single,nano
    python benchmarks/quantised_models.py --model gpt-oss-20b --formats mxfp4,plain --workloads single

Workloads are those of `quire bench`: token ids in and out, no end-of-sequence stop. Each figure is the best of the
runs, in output tokens per second; for `prefill`, prompt tokens per second. `mxfp4` is for gpt-oss-20b only, whose
experts are random codes then.
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
from shapes import GPT_OSS_20B, QWEN3_30B
from shapes import SHAPES as DENSE

from quire import LLM, SamplingParams
from quire.bench.load.workloads import WORKLOADS, shifted
from quire.layers.env import StoredShape
from quire.models.checkpoint import checkpoint
from quire.models.checkpoint.checkpoint import DummyCheckpoint

VOCAB = 100_000
SHAPES = {**DENSE, "Qwen3-30B-A3B": QWEN3_30B, "gpt-oss-20b": GPT_OSS_20B}


class Mxfp4Checkpoint(DummyCheckpoint):
    """Random weights whose experts are stored as in gpt-oss: codes of e2m1 numbers and the exponents of scales."""

    def stored(self, name: str) -> StoredShape | None:
        if name.endswith("_proj_blocks"):
            return StoredShape(torch.uint8, (GPT_OSS_20B["num_local_experts"],))
        return None

    def packed(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), cols: slice = slice(None)
    ) -> torch.Tensor:
        size = (len(range(*rows.indices(shape[0]))), *shape[1:])
        low, high = (118, 122) if name.endswith("_scales") else (0, 256)
        return torch.randint(low, high, size, dtype=torch.uint8, device=self.block.device)


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
    parser.add_argument("--kv-cache-dtype", default="auto", help="format of keys and values")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "quantised_models.json"))
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.model]))
        for kind in args.formats.split(","):
            begin = time.perf_counter()
            checkpoint.DummyCheckpoint = Mxfp4Checkpoint if kind == "mxfp4" else DummyCheckpoint  # type: ignore[misc]
            llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
                quantization="auto" if kind in ("plain", "mxfp4") else kind, kv_cache_dtype=args.kv_cache_dtype,
            )  # fmt: skip
            print(f"{kind}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
            for name in args.workloads.split(","):
                runs = [
                    run(llm, shifted(WORKLOADS[name](VOCAB, None), VOCAB, seed)) for seed in range(args.runs)
                ]
                best = min(runs, key=lambda one: one["seconds"])
                results.append({"format": kind, "kv": args.kv_cache_dtype, "workload": name, **best})
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
