"""Time to first token of conversations whose working set is ten times the KV cache, by where evicted blocks go.

Run `python benchmarks/kv_tiers.py`: the same turns are served four times in one process, one at a time: without other
tiers (evicted prefixes are computed again), with a device pool for all, with host memory, and with a disk behind little
host memory. Answers
must be equal in float32; in other formats the share of equal ones is reported. On a GPU:

    python benchmarks/kv_tiers.py --device cuda --shape Qwen3-0.6B --dtype bfloat16 --first 8000 --conversations 12
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

from shapes import SHAPES

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams

TIERS = ("recompute", "device", "host memory", "disk")


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
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tiers", nargs="*", choices=TIERS, default=TIERS)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=1400, help="tokens of a first turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = compare(args, Path(folder))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


def compare(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Serve the same load with each tier, print a line for each, and return the figures."""
    load = conversations(args.conversations, args.turns, args.first, 32)
    longest = args.first + args.turns * (32 + 16)
    base: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "max_model_len": longest + 16}
    base |= {"model": args.model, "skip_tokenizer_init": True}
    if args.shape:
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        base |= {"model": str(folder), "load_format": "dummy", "max_num_seqs": 16}
    small = {"kv_cache_memory": 1 << 32 if args.shape else 1 << 26, "capture_at_start": False}
    probe, info = build_engine(EngineConfig(**base, **small))
    probe.close()
    working_set = args.conversations * longest // info.block_size * info.block_bytes
    base["kv_cache_memory"] = max(working_set // 10, (longest // info.block_size + 4) * info.block_bytes)
    settings: dict[str, dict[str, Any]] = {
        "recompute": {},
        # A control: prefixes that never leave, so answers differ from `recompute` by the rounding of chunks only.
        "device": {"kv_cache_memory": working_set * 5 // 4},
        "host memory": {"kv_host_memory": 1.3 * working_set / 1e9},
        "disk": {"kv_host_memory": base["kv_cache_memory"] * 1.5 / 1e9, "kv_disk": str(folder / "blocks")},
    }
    results: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    for name in args.tiers:
        engine, info = build_engine(EngineConfig(**base | settings[name]))
        times, answers = serve(engine, load, answer=16)
        engine.close()
        expected = expected or answers
        equal = sum(map(list.__eq__, answers, expected)) / len(answers)
        assert equal == 1 or args.dtype != "float32", "the answers differ"
        results.append(figures(name, times, engine) | {"equal_answers": equal, "start_s": info.phases_s})
        one = results[-1]
        ratio = results[0]["mean_ttft_ms"] / one["mean_ttft_ms"]
        print(
            f"{name:12} mean TTFT {one['mean_ttft_ms']:7.1f} ms ({ratio:4.2f}x)  p99 {one['p99_ttft_ms']:7.1f} ms  "
            f"cached {one['cached_share']:.0%}  equal answers {equal:.0%}",
            flush=True,
        )
    print(
        f"working set {working_set / 1e6:.0f} MB, device {base['kv_cache_memory'] / 1e6:.0f} MB", flush=True
    )
    return results


def figures(name: str, times: list[float], engine: Engine) -> dict[str, Any]:
    """Return the figures of one tier."""
    totals = engine.log.totals
    return {
        "tier": name,
        "mean_ttft_ms": 1e3 * statistics.fmean(times),
        "p99_ttft_ms": 1e3 * sorted(times)[int(0.99 * len(times))],
        "cached_share": totals.cached_tokens / totals.queried_tokens,
        "fetched_tokens": totals.fetched_tokens,
        "moved_mb": {kind: count / 1e6 for kind, count in totals.moved_bytes.items()},
    }


if __name__ == "__main__":
    main()
