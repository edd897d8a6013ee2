"""`quire bench`: measurements on this machine."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["host"], help="host: scheduler and step loop without a model")
    parser.add_argument("--rows", type=int, default=256, help="requests decoding at once (default 256)")
    parser.add_argument("--steps", type=int, default=1000, help="steps to time (default 1000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quire.bench.host import host_cost

    figures = host_cost(args.rows, args.steps)
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"Host cost of one step with {figures['rows']:.0f} decode rows, median of {figures['steps']:.0f}:")
    for name in ("step", "schedule", "retire"):
        print(f"  {name:<9} {figures[f'{name}_us']:7.0f} us")
    print(f"  99 % of steps take at most {figures['step_p99_us']:.0f} us")
    return 0
