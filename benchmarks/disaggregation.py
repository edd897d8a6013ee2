"""Inter-token latency of decoding requests while long prompts arrive: prefill in a process of its own, and joint.

    python benchmarks/disaggregation.py [--shape Llama-3.1-8B --device cuda --dtype bfloat16 --streams 64] [--json FILE]

In one run, the same load is served four times: decoding alone, with long prompts in the same engine in chunks and whole,
and with long prompts in a prefill process. The ratio of p99 to that of decoding alone is the figure to look at. On a
CPU both engines share the cores, so give each its own: `--cpu-threads 1` on two cores. The time to copy blocks between
two engines is measured apart: on a CPU through memory, on GPUs from the first one to the second one, gathered and
scattered. A mode that the engine refuses is reported with the reason.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, QuireError, SamplingParams

COPIED_BLOCKS, BLOCK_BYTES = 128, 2 << 20  # of 16 tokens of an 8B model in bfloat16, all layers together


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


def copy_gb_s(device: str) -> float:
    """Return GB/s of copies of scattered blocks between the memories of two engines, the median of ten."""
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    places = [torch.device("cuda", min(index, gpus - 1)) if gpus else torch.device("cpu") for index in (0, 1)]
    source, target = (
        torch.ones(COPIED_BLOCKS * 2, BLOCK_BYTES, dtype=torch.uint8, device=place) for place in places
    )
    order = torch.randperm(len(source))[:COPIED_BLOCKS]
    ours, theirs = (order.to(place) for place in places)

    def copy() -> None:
        if gpus:
            target.index_copy_(0, theirs, source.index_select(0, ours).to(places[1]))
            torch.cuda.synchronize(places[1])
            return
        for block in order.tolist():  # as a mover on a CPU does
            target[block] = source[block]

    times = []
    for _ in range(11):
        begin = time.perf_counter()
        copy()
        times.append(time.perf_counter() - begin)
    return COPIED_BLOCKS * BLOCK_BYTES / sorted(times[1:])[5] / 1e9


def settings_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the settings of every engine. A shape gets random weights in `folder`."""
    base: dict[str, Any] = {"model": args.model, "device": args.device, "dtype": args.dtype}
    if args.shape:
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        base |= {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
        base |= {"max_model_len": args.prompt_len + args.tokens + 64}
    if args.device == "cpu":
        base |= {"kv_cache_memory": 1 << 28, "cpu_threads": args.cpu_threads}
    return base


def main() -> None:
    """Run the benchmark and print one line per mode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), help="random weights of this shape instead of --model"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
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
    modes: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
        "decoding alone": ({}, []),
        "joint": ({}, prompts),
        "joint, steps of 2048": ({"mixed_prefill_tokens": 2048}, prompts),
        "prefill:1,decode:1": ({"disaggregate": "prefill:1,decode:1"}, prompts),
    }
    results: dict[str, Any] = {"copy_gb_s": copy_gb_s(args.device)}
    print(f"blocks between two engines: {results['copy_gb_s']:.1f} GB/s", flush=True)
    folder = tempfile.TemporaryDirectory()
    base = settings_of(args, Path(folder.name))
    for mode, (settings, load) in modes.items():
        try:
            engine, _ = build_engine(EngineConfig(**base, **settings))
        except QuireError as error:
            results[mode] = {"refused": str(error)}
            print(f"{mode:22} {error}", flush=True)
            continue
        measure(engine, args.streams, 50, [], 1.0)
        results[mode] = one = measure(engine, args.streams, args.tokens, load, args.every)
        results[mode]["moved_bytes"] = engine.log.totals.moved_bytes
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
