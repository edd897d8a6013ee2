"""Seconds from the command line of `quire serve` to the first answer, in fresh processes, by phase.

python benchmarks/serve_startup.py --model demo --rounds 5
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request


def start(model: str) -> dict[str, float]:
    """Start a server and return the times of its phases in seconds.

    Times count from the start of the process, except those of `engine_*`, which are durations.
    """
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127.0.0.1:\d+", line):
                break
        assert found, "the server did not start"
        phases = {"listening": time.perf_counter() - began_s}
        body = json.dumps({"messages": [{"role": "user", "content": "What is 27 + 45?"}], "max_tokens": 8})
        asked_s = time.perf_counter()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{found[0]}/v1/chat/completions", body.encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        ended_s = time.perf_counter()
        phases |= {"first_request": ended_s - asked_s, "answered": ended_s - began_s}
        with urllib.request.urlopen(f"{found[0]}/stats", timeout=60) as answer:
            engine = json.load(answer)["start_up_s"]
        return phases | {f"engine_{name}": seconds for name, seconds in engine.items()}
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds = [start(args.model) for _ in range(args.rounds)]
    for phase in rounds[0]:
        values = [one.get(phase, 0.0) for one in rounds]
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"{phase:<20} median {statistics.median(values):.2f} s, worst {max(values):.2f} s  ({each})")


if __name__ == "__main__":
    main()
