"""Data parallelism: throughput of N replicas against one, and what the router gains over taking turns.

    python benchmarks/replicas.py [--replicas 4] [--parts hits chat] [--model Llama-3.1-8B] [--out FILE]

`chat` needs as many GPUs as replicas. It serves a model with random weights in bfloat16, on one GPU and on all, and
sends the workload `chat` once per replica, all requests at once; each figure is the better of two runs. `hits` needs no
GPU: conversations of several turns reach a server without a model (`--dry-run`), whose schedulers and prefix caches are
the real ones, with each router in turn. Results are printed as they come and written as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from shapes import SHAPES

ROUTERS = ("prefix", "load", "round-robin")
PARTS = ("hits", "chat")
CHAT_REQUESTS = 1000  # of the workload, for each replica


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """Run `quire serve` with `flags`, and yield its address."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "quire",
        "serve",
        *flags,
        "--port",
        "0",
        "--log-stats-interval",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"serving on (\S+)", line):
                yield found[1]
                break
        else:
            raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


async def conversations(url: str, count: int, turns: int, at_once: int) -> dict[str, float]:
    """Hold conversations with a common system prompt, each turn of which holds everything said before.

    Returns:
        The prompt tokens in total, those found in a prefix cache, and those that an earlier turn has computed.
    """
    source = random.Random(7)
    system = source.choices(range(300, 1500), k=256)
    talks = [(source.choices(range(300, 1500), k=source.randint(32, 128)), turns) for _ in range(count)]
    totals = {"prompt": 0.0, "cached": 0.0, "repeated": 0.0}
    room = asyncio.Semaphore(at_once)

    async def talk(http: httpx.AsyncClient, said: list[int], turns: int) -> None:
        prompt, before = [*system, *said], 0
        for _ in range(turns):
            async with room:
                body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}
                answer = (await http.post("/v1/completions", json=body)).json()
            totals["prompt"] += len(prompt)
            totals["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            totals["repeated"] += before or len(system)
            prompt = prompt + answer["choices"][0]["token_ids"]
            before = len(prompt)
            prompt = prompt + source.choices(range(300, 1500), k=48)
            await asyncio.sleep(source.uniform(0, 0.05))  # the reader

    async with httpx.AsyncClient(
        base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)
    ) as http:
        await asyncio.gather(*(talk(http, *one) for one in talks))
    return totals


def hits(replicas: int, conversations_count: int, turns: int) -> dict[str, Any]:
    """Return hit rates and the balance of load by router. Each cache holds half of the conversations' tokens."""
    found: dict[str, Any] = {}
    per_talk = 256 + 80 + turns * 112
    memory = 1024 * conversations_count * per_talk // 2  # a token of a dry run has 1,024 bytes
    for routing in ROUTERS:
        flags = ["demo", "--dry-run", "--dry-run-step-ms", "2", "--kv-cache-memory", str(memory)]
        with server(*flags, "--data-parallel-size", str(replicas), "--routing", routing) as url:
            totals = asyncio.run(conversations(url, conversations_count, turns, at_once=8 * replicas))
            counts = httpx.get(f"{url}/stats").json()["replicas"]
        loads = [one["generated"] for one in counts]
        found[routing] = {
            "hit_rate": round(totals["cached"] / totals["prompt"], 4),
            "most_possible": round(totals["repeated"] / totals["prompt"], 4),
            "busiest_over_mean": round(max(loads) * len(loads) / sum(loads), 3),
        }
        print(routing, found[routing], flush=True)
    return found


def bench(url: str, requests: int, out: Path) -> dict[str, Any]:
    """Send the workload `chat` to a server, and return what the benchmark reports."""
    flags = ["--dataset-name", "workload", "--workload", "chat", "--num-prompts", str(requests)]
    command = [
        sys.executable,
        "-m",
        "quire",
        "bench",
        "serve",
        "--base-url",
        url,
        *flags,
        "--output-json",
        str(out),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def chat(replicas: int, model: str, requests: int, flags: list[str]) -> dict[str, Any]:
    """Return the output tokens per second of one replica and of all, and the gain."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model in SHAPES:
            (folder / "config.json").write_text(json.dumps(SHAPES[model]))
            flags = [str(folder), "--load-format", "dummy", "--skip-tokenizer-init", *flags]
        else:
            flags = [model, *flags]
        for count in (1, replicas):
            with server(*flags, "--data-parallel-size", str(count), "--max-waiting", "100000") as url:
                runs = [bench(url, count * requests, folder / "run.json") for _ in range(2)]
            best = max(runs, key=lambda run: run["output_throughput"])
            found[str(count)] = best
            print(f"{count} replicas: {best['output_throughput']:.1f} output tokens/s", flush=True)
    gain = found[str(replicas)]["output_throughput"] / found["1"]["output_throughput"]
    found["gain"] = round(gain, 3)
    print(f"gain: {gain:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="Llama-3.1-8B", help=f"a model, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--requests", type=int, default=CHAT_REQUESTS, help="of `chat`, for each replica")
    parser.add_argument("--conversations", type=int, default=96, help="of `hits`")
    parser.add_argument("--turns", type=int, default=5, help="of each conversation")
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args()  # other flags are those of `quire serve`
    results: dict[str, Any] = {"replicas": args.replicas}
    if "hits" in args.parts:
        results["hits"] = hits(args.replicas, args.conversations, args.turns)
    if "chat" in args.parts:
        results["chat"] = chat(args.replicas, args.model, args.requests, flags)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
