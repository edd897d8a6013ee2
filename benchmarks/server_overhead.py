"""Overhead of the server over the engine alone: both serve the same load, in turn, on the same machine.

    python benchmarks/server_overhead.py --model demo --streams 64

Three runs make a round:

alone    `quire bench throughput`: the engine in one process, with token ids as prompts and without detokenization
served   `quire bench serve` with as many streams: with detokenization, and client, API process and engine process share
         the processor
beside   the engine alone, next to a process that uses as much processor time as the client did, in a burst for each
         step. A client on another machine would use none, so served / beside is the cost of the server

Ratios are those of medians. They say little on a shared machine. The processor time of each process, read from the
operating system, depends less on the load of others. (The client reports its own time, from the first request on.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil


def quire(*args: str) -> list[str]:
    return [sys.executable, "-m", "quire", *args]


class Server:
    def __init__(self, engine: list[str]) -> None:
        command = quire("serve", "--port", "0", *engine)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"http://127.0.0.1:\d+", line):
                self.url = found[0]
                break
        self._api = psutil.Process(self._process.pid)
        (self._engine,) = (p for p in self._api.children() if "quire.engine_process" in p.cmdline())

    def processor_s(self) -> dict[str, float]:
        """Return the processor seconds of each process so far."""
        parts = {"api": self._api, "engine": self._engine}
        return {name: sum(process.cpu_times()[:2]) for name, process in parts.items()}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


_BURNER = """
import sys, time
burst_s, pause_s = map(float, sys.argv[1:])
while True:
    time.sleep(pause_s)
    end_s = time.process_time() + burst_s
    while time.process_time() < end_s:
        pass
"""


@contextlib.contextmanager
def burner(burst_s: float, step_s: float) -> Iterator[None]:
    """Run a process that uses the processor for `burst_s` once per step."""
    pause_s = max(step_s - burst_s, 0.0005)
    process = subprocess.Popen([sys.executable, "-c", _BURNER, str(burst_s), str(pause_s)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(command: list[str]) -> dict[str, Any]:
    """Run a benchmark and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        subprocess.run([*command, "--output-json", str(file)], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", nargs="*", default=[], help="further flags of the engine, without --")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="openai")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens per event")
    parser.add_argument("--num-warmups", type=int, default=1)
    args = parser.parse_args()
    flags = [f"--{part}" for part in args.engine]
    engine = ["--max-num-seqs", str(args.streams), *flags]
    load = [
        "--num-prompts",
        str(args.streams),
        "--input-len",
        str(args.input_len),
        "--output-len",
        str(args.output_len),
    ]
    alone = quire("bench", "throughput", "--model", args.model, *engine, *load, "--num-warmups", "1")
    server = Server([args.model, *engine, "--stream-interval", str(args.stream_interval)])
    rounds = []
    try:
        for i in range(args.rounds):
            rounds.append(one_round(server, alone, load, args, i))
            print(", ".join(f"{name} {value:.1f}" for name, value in rounds[-1].items()), flush=True)
    finally:
        server.close()
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    print("medians: " + ", ".join(f"{name} {value:.1f}" for name, value in middle.items()))
    print(f"processor time: API process / engine process {middle['api_us'] / middle['engine_us']:.3f}")
    print(f"tokens/s: served / alone {middle['served'] / middle['alone']:.3f}")
    print(f"tokens/s: served / beside {middle['served'] / middle['beside']:.3f}")


def one_round(
    server: Server, alone: list[str], load: list[str], args: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Return the tokens per second of the three runs, and the processor microseconds per served token."""
    first = run(alone)
    before = server.processor_s()
    more = ["--temperature", "0", "--seed", str(seed), "--backend", args.backend]
    served = run(quire("bench", "serve", "--base-url", server.url, *load, *more))
    after = server.processor_s()
    spent_s = {name: after[name] - before[name] for name in after} | {"client": served["client_processor_s"]}
    per_token = {name: seconds / served["total_output_tokens"] for name, seconds in spent_s.items()}
    with burner(per_token["client"] * args.streams, first["median_itl_ms"] / 1000):
        beside = run(alone)
    return {
        "alone": first["output_throughput"],
        "served": served["output_throughput"],
        "beside": beside["output_throughput"],
        **{f"{name}_us": value * 1e6 for name, value in per_token.items()},
    }


if __name__ == "__main__":
    main()
