"""Inter-token latency of decoding requests while long prompts arrive: prefill in a process of its own, and joint.

Run `python benchmarks/disaggregation.py`. In one run, the same load is served three times: decoding alone, with long
prompts in the same engine, and with long prompts in a prefill process. On a CPU both engines share the cores, so give
each its own: `--cpu-threads 1` on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams


def measure(
    engine: Engine, streams: int, tokens: int, prompts: list[list[int]], every_s: float
) -> dict[str, float]:
    """Decode `streams` requests, and add a prompt every `every_s` seconds. Return milliseconds."""
    rng = random.Random(1)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i in range(streams):
        engine.add(EngineRequest(f"s{i}", [rng.randrange(5, 400) for _ in range(16)], sampling))
    last: dict[str, float] = {}
    gaps: list[float] = []
    sent: dict[str, float] = {}
    first: list[float] = []
    due = time.perf_counter() + every_s
    waiting = list(prompts)
    while any(name.startswith("s") for name in engine.scheduler.requests):
        if waiting and len(last) == streams and time.perf_counter() >= due:
            name, due = f"p{len(waiting)}", time.perf_counter() + every_s
            sent[name] = time.perf_counter()
            engine.add(EngineRequest(name, waiting.pop(), SamplingParams(max_tokens=2, temperature=0.0)))
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.token_ids and output.id.startswith("s"):
                if output.id in last:
                    gaps.append(now - last[output.id])
                last[output.id] = now
            elif output.token_ids and output.id in sent:
                first.append(now - sent.pop(output.id))
    for name in list(engine.scheduler.requests):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    gaps.sort()
    return {
        "itl_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "itl_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
        "itl_max_ms": 1e3 * gaps[-1],
        "prompts": float(len(first)),
        "ttft_ms": 1e3 * sum(first) / len(first) if first else 0.0,
    }


def main() -> None:
    """Run the benchmark and print one line per mode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between prompts")
    parser.add_argument("--cpu-threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 400) for _ in range(args.prompt_len)] for _ in range(args.prompts)]
    base: dict[str, Any] = {
        "model": args.model,
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": 1 << 28,
    }
    base["cpu_threads"] = args.cpu_threads
    modes: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
        "decoding alone": ({}, []),
        "joint": ({}, prompts),
        "joint, steps of 2048": ({"mixed_prefill_tokens": 2048}, prompts),
        "prefill:1,decode:1": ({"disaggregate": "prefill:1,decode:1"}, prompts),
    }
    results: dict[str, dict[str, float]] = {}
    for mode, (settings, load) in modes.items():
        engine, _ = build_engine(EngineConfig(**base, **settings))
        measure(engine, args.streams, 50, [], 1.0)
        results[mode] = one = measure(engine, args.streams, args.tokens, load, args.every)
        engine.close()
        ratio = one["itl_p99_ms"] / results["decoding alone"]["itl_p99_ms"]
        print(
            f"{mode:22} ITL p50 {one['itl_p50_ms']:6.2f}  p99 {one['itl_p99_ms']:7.2f} ms ({ratio:5.2f}x)  "
            f"max {one['itl_max_ms']:7.1f}  TTFT of {one['prompts']:.0f} prompts {one['ttft_ms']:7.1f} ms",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
