"""The quire command on the demo model, as a person would type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


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


def test_bench_throughput_and_latency(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    lengths = ["--input-len", "20", "--output-len", "6"]
    done = quire("bench", "throughput", "--num-prompts", "5", *lengths, "--output-json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["total_input_tokens"] == 100 and found["total_output_tokens"] == 30
    assert found["tokens_per_second"] == 130 / found["elapsed_time"]
    assert "Throughput: " in done.stdout and "Total num output tokens:  30" in done.stdout
    few = ["--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3"]
    done = quire("bench", "latency", *lengths, *few, "--output-json", str(file))
    assert done.returncode == 0 and "99% percentile latency" in done.stdout
    assert len(json.loads(file.read_text())["latencies"]) == 3


def test_bench_refuses_what_does_not_fit() -> None:
    done = quire("bench", "throughput", "--workload", "prefill")
    assert done.returncode == 2 and "3586 tokens, but max_model_len is 2048" in done.stderr
    done = quire(
        "bench", "throughput", "--num-prompts", "1", "--output-len", "1", "--output-json", "/no/such/x.json"
    )
    assert done.returncode == 2 and "cannot write /no/such/x.json" in done.stderr
