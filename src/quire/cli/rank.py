"""`quire rank`: ranks on another host than the engine's."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from quire.frontend.client.remote import split_address
from quire.types import ConfigError

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire rank`."""
    parser.add_argument("address", metavar="HOST:PORT", help="rank_address of the engine")
    parser.add_argument(
        "--device", default="auto", help="device of the first rank: auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--count", type=int, default=1, help="number of ranks, on the GPUs from --device on (default: 1)"
    )
    parser.add_argument(
        "--rank-token", metavar="STR", help="rank_token of the engine (also QUIRE_RANK_TOKEN)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the ranks until the engine ends, and return the exit code: that of the first rank to fail, or 0."""
    if sys.platform == "win32":
        raise ConfigError("quire rank needs Linux or macOS")
    split_address(args.address)
    token = args.rank_token or os.environ.get("QUIRE_RANK_TOKEN", "")
    if not token:
        raise ConfigError(
            "quire rank needs the rank_token of the engine: set --rank-token or QUIRE_RANK_TOKEN"
        )
    if args.count < 1:
        raise ConfigError(f"--count must be at least 1, got {args.count}")
    ranks = [_start(args.address, device, token) for device in _devices(args.device, args.count)]
    try:
        while all(rank.poll() is None for rank in ranks):
            time.sleep(_POLL_S)
        return next((rank.returncode for rank in ranks if rank.returncode), 0)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def _devices(first: str, count: int) -> list[str]:
    kind, _, index = first.partition(":")
    if kind == "cpu":
        return ["cpu"] * count
    return [f"{kind}:{int(index or 0) + number}" for number in range(count)]


def _start(address: str, device: str, token: str) -> subprocess.Popen[str]:
    """Start a rank. The token goes through standard input, because others can read command lines."""
    command = [sys.executable, "-m", "quire.rank_process", "connect", address, device]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(f"{token}\n")
    process.stdin.close()
    return process
