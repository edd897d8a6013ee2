"""The quire command on the demo model, as a person would type it."""

from __future__ import annotations

import subprocess
import sys


def quire(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quire", *args], input=stdin, capture_output=True, text=True)


def test_generate_streams_and_sums_up() -> None:
    done = quire("generate", "--summary", "--temperature", "0", "--max-tokens", "20", "Once upon a time")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time ")
    for word in ("tokens      ", "speed ", "first token", "start-up"):
        assert word in done.stdout


def test_generate_repeats_with_a_seed() -> None:
    runs = {quire("generate", "--seed", "5", "--max-tokens", "20", "Once").stdout for _ in range(2)}
    other = quire("generate", "--seed", "6", "--max-tokens", "20", "Once").stdout
    assert len(runs) == 1 and other not in runs


def test_chat_over_several_turns() -> None:
    done = quire("chat", "--temperature", "0", stdin="What is 3 + 4?\nWhat is 20 - 5?\n/reset\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert "3 + 4 = 7" in done.stdout and "20 - 5 = 15" in done.stdout
    first, second = (line for line in done.stdout.splitlines() if "from the prefix cache]" in line)
    assert "; 0 of " in first and "; 0 of " not in second, "the second turn reuses the first"


def test_doctor_says_what_and_why() -> None:
    done = quire("doctor", "--load", "--device", "cpu", "--kv-layout", "contiguous")
    assert done.returncode == 0, done.stderr
    for word in (
        "torch",
        "10.4 M parameters",
        "cpu: as asked",
        "contiguous",
        "weights",
        "pages of 2048 tokens",
        "Start-up",
    ):
        assert word in done.stdout


def test_bench_host() -> None:
    done = quire("bench", "host", "--rows", "16", "--steps", "50")
    assert done.returncode == 0 and "16 decode rows" in done.stdout
