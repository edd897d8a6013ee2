"""Time to first token of conversations whose working set is ten times the KV cache, by where evicted blocks go.

Run `python benchmarks/kv_tiers.py`: the same turns are served three times in one process, one at a time: without other
tiers (evicted prefixes are computed again), with host memory, and with a disk behind little host memory. Answers
are compared in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams


def conversations(count: int, turns: int, first: int, more: int) -> list[list[list[int]]]:
    """Return new prompt tokens by conversation and turn: `first` tokens, then `more` in each further turn."""
    rng = random.Random(0)
    return [
        [[rng.randrange(5, 400) for _ in range(more if turn else first)] for turn in range(turns)]
        for _ in range(count)
    ]


def serve(engine: Engine, load: list[list[list[int]]], answer: int) -> tuple[list[float], list[list[int]]]:
    """Serve the turns, all conversations taking turns. Return seconds to first token of later turns, and all answers."""
    contexts: list[list[int]] = [[] for _ in load]
    times, answers = [], []
    for turn in range(len(load[0])):
        for number, conversation in enumerate(load):
            contexts[number] += conversation[turn]
            begin, first = time.perf_counter(), None
            params = SamplingParams(max_tokens=answer, temperature=0.0)
            engine.add(EngineRequest(f"{number}-{turn}", list(contexts[number]), params))
            got: list[int] = []
            ended = False
            while not ended:
                for output in engine.step():
                    got += output.token_ids
                    first = first or (time.perf_counter() if got else None)
                    ended = output.finish_reason is not None
            contexts[number] += got
            answers.append(got)
            if turn and first:
                times.append(first - begin)
    return times, answers


def main() -> None:
    """Run the benchmark and print one line per tier."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=1400, help="tokens of a first turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    load = conversations(args.conversations, args.turns, args.first, 32)
    longest = args.first + args.turns * (32 + 16)
    results: list[dict[str, Any]] = []
    expected = None
    with tempfile.TemporaryDirectory() as folder:
        base: dict[str, Any] = {
            "model": args.model,
            "device": args.device,
            "max_model_len": longest + 16,
            "dtype": "float32",
        }
        probe, info = build_engine(EngineConfig(**base, kv_cache_memory=1 << 26))
        probe.close()
        working_set = args.conversations * longest // info.block_size * info.block_bytes
        base["kv_cache_memory"] = max(working_set // 10, (longest // info.block_size + 4) * info.block_bytes)
        tiers: dict[str, dict[str, Any]] = {
            "recompute": {},
            "host memory": {"kv_host_memory": 2 * working_set / 1e9},
            "disk": {"kv_host_memory": base["kv_cache_memory"] * 1.5 / 1e9, "kv_disk": folder},
        }
        for name, settings in tiers.items():
            engine, info = build_engine(EngineConfig(**base, **settings))
            times, answers = serve(engine, load, answer=16)
            engine.close()
            assert expected in (None, answers), "the answers differ"
            expected = answers
            totals = engine.log.totals
            results.append(
                {
                    "tier": name,
                    "mean_ttft_ms": 1e3 * statistics.fmean(times),
                    "p99_ttft_ms": 1e3 * sorted(times)[int(0.99 * len(times))],
                    "cached_share": totals.cached_tokens / totals.queried_tokens,
                    "fetched_tokens": totals.fetched_tokens,
                    "moved_mb": {kind: count / 1e6 for kind, count in totals.moved_bytes.items()},
                }
            )
            one = results[-1]
            ratio = results[0]["mean_ttft_ms"] / one["mean_ttft_ms"]
            print(
                f"{name:12} mean TTFT {one['mean_ttft_ms']:7.1f} ms ({ratio:4.2f}x)  p99 {one['p99_ttft_ms']:7.1f} ms  "
                f"cached {one['cached_share']:.0%}",
                flush=True,
            )
    print(
        f"working set {working_set / 1e6:.0f} MB, device {base['kv_cache_memory'] / 1e6:.0f} MB, same answers"
    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
