"""What the server costs over the engine alone: the same work through both, in turns, on the same machine.

    python benchmarks/server_overhead.py --model demo --streams 64

The engine alone is `quire bench throughput` (prompts are ids, no text); with the server it is `quire bench serve`
with as many streams, so text is made, and client, API process and engine process share the processor. Each
round takes one of each; the ratio is that of the medians. On a machine that others use too it says little; what
does not depend on them is the processor time of each process, read from the operating system. (The client's
includes its start.)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
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
        (self._engine,) = self._api.children()

    def processor_s(self) -> dict[str, float]:
        """Processor seconds so far of each process."""
        parts = {"api": self._api, "engine": self._engine}
        return {name: sum(process.cpu_times()[:2]) for name, process in parts.items()}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def run(command: list[str]) -> tuple[dict[str, Any], float]:
    """The result of a benchmark, and the processor seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        before = os.times()
        subprocess.run([*command, "--output-json", str(file)], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        took = after.children_user + after.children_system - before.children_user - before.children_system
        return json.loads(file.read_text()), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", nargs="*", default=[], help="further flags of the engine, without --")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="openai")
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
    server = Server([args.model, *engine])
    alone, served, times = [], [], []
    try:
        for i in range(args.rounds):
            found, _ = run(
                quire("bench", "throughput", "--model", args.model, *engine, *load, "--num-warmups", "1")
            )
            alone.append(found)
            before = server.processor_s()
            more = ["--temperature", "0", "--seed", str(i), "--backend", args.backend]
            found, client_s = run(quire("bench", "serve", "--base-url", server.url, *load, *more))
            after = server.processor_s()
            served.append(found)
            tokens = found["total_output_tokens"]
            times.append(
                {"client": client_s / tokens * 1e6}
                | {n: (after[n] - before[n]) / tokens * 1e6 for n in after}
            )
            print(
                f"engine alone {alone[-1]['output_throughput']:8.1f} tokens/s, ITL {alone[-1]['median_itl_ms']:6.2f} ms;  "
                f"served {found['output_throughput']:8.1f} tokens/s, ITL {found['median_itl_ms']:6.2f} ms;  us/token: "
                + ", ".join(f"{name} {value:.0f}" for name, value in times[-1].items()),
                flush=True,
            )
    finally:
        server.close()
    spent = {part: statistics.median(one[part] for one in times) for part in ("api", "engine")}
    print(f"processor time: API process / engine process {spent['api'] / spent['engine']:.3f}")
    for name in ("output_throughput", "median_itl_ms", "duration"):
        one, other = (statistics.median(found[name] for found in kind) for kind in (alone, served))
        print(f"{name}: alone {one:.2f}, served {other:.2f}, ratio {other / one:.3f}")


if __name__ == "__main__":
    main()
