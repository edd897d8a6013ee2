"""Train the tokenizer and both models, and evaluate them, in one command: `python -m training.run --out DIR`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo model from nothing.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default="8400")
    parser.add_argument("--minutes", default="30")
    parser.add_argument("--rows", default="48")
    parser.add_argument("--workers", default="14")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", default="1", help="share of the evaluation cases")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    out: Path = args.out
    train = [
        "--tokenizer",
        out / "tokenizer",
        "--out",
        out,
        "--steps",
        args.steps,
        "--minutes",
        args.minutes,
        "--rows",
        args.rows,
        "--workers",
        args.workers,
        "--device",
        args.device,
    ]
    evaluate = [
        "--model",
        out / "base",
        "--draft",
        out / "draft",
        "--device",
        args.device,
        "--share",
        args.share,
    ]
    for module, options in (
        ("tokenizer", ["--out", out / "tokenizer"]),
        ("train", train + ["--tiny"] * args.tiny),
        ("evaluate", [*evaluate, "--out", out / "evaluation.json"]),
    ):
        subprocess.run([sys.executable, "-m", f"training.{module}", *map(str, options)], check=True)


if __name__ == "__main__":
    main()
