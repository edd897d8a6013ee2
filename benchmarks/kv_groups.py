"""Throughput of Gemma 3 4B on long prompts, with blocks released behind windows and with every block kept.

    python benchmarks/kv_groups.py [--memory 10] [--prompt 16000] [--requests 24] [--out FILE]

The model has random weights in its true shape. Both cases get the same bytes of KV cache, which hold a few requests if
every layer keeps all entries. One more case decodes a plain model, whose single group costs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shapes import GEMMA3_4B, QWEN3_06B

from quire.config import EngineConfig
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams
from quire.worker.memory import kv_groups
from quire.worker.memory.kv_groups import one_group


def measure(
    shape: dict[str, Any], prompt: int, answer: int, requests: int, **settings: Any
) -> dict[str, Any]:
    """Run `requests` requests at once and return figures of the run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            model=folder, load_format="dummy", skip_tokenizer_init=True, prefix_caching=False, max_num_seqs=requests,
            max_model_len=prompt + answer + 16, **settings,
        )  # fmt: skip
        engine, info = build_engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for number in range(requests):
        engine.add(EngineRequest(str(number), [5 + number] * prompt, params))
    began, most = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    took = time.perf_counter() - began
    full = [record.took_s for record in engine.log if len(record.rows) == most and record.num_tokens == most]
    found = {
        "groups": info.kv_groups, "block_bytes": info.block_bytes, "num_blocks": info.num_blocks,
        "running": most, "seconds": round(took, 3), "output_tok_s": round(requests * answer / took, 1),
        "preempted": engine.log.totals.pressure,
        "decode_step_ms": round(1e3 * statistics.median(full), 3) if full else None,
        "schedule_us": round(1e6 * statistics.median(r.schedule_s for r in engine.log), 1),
    }  # fmt: skip
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--memory", type=float, default=10, help="KV cache in GiB")
    parser.add_argument("--prompt", type=int, default=16_000)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gemma = {
        "shape": GEMMA3_4B, "prompt": args.prompt, "answer": 256, "requests": args.requests,
        "kv_cache_memory": int(args.memory * 2**30),
    }  # fmt: skip
    plain = {"shape": QWEN3_06B, "prompt": 512, "answer": 256, "requests": 64}
    keep_all: Callable[..., Any] = lambda layouts, max_len: one_group(layouts)  # noqa: E731
    cases: dict[str, tuple[dict[str, Any], bool]] = {
        "gemma, groups": (gemma, False), "gemma, every block kept": (gemma, True), "plain model": (plain, False),
    }  # fmt: skip
    results: dict[str, Any] = {}
    for name, (settings, keeps_all) in cases.items():
        try:
            with ExitStack() as stack:
                if keeps_all:
                    stack.enter_context(patch.object(kv_groups, "group_layers", keep_all))
                results[name] = measure(**settings)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": repr(error)}
        print(name, results[name], flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
