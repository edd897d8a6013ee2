"""`quire bench serve` against a server, from flags to figures."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from serving import Server, serving

from quire.cli.main import main

KEYS = {
    "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests",
}  # fmt: skip
SMALL = ["--num-prompts", "12", "--input-len", "20", "--output-len", "8"]


def bench(server: Server, tmp_path: Path, *flags: str) -> dict:
    file = tmp_path / "result.json"
    assert main(["bench", "serve", "--base-url", server.url, "--output-json", str(file), *flags]) == 0
    return json.loads(file.read_text())


def test_the_block_and_the_keys(dry: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--goodput", "ttft:60000", "--save-detailed"]
    found = bench(dry, tmp_path, *SMALL, *more, "--metadata", "machine=mine", "--max-concurrency", "3")
    assert found.keys() >= KEYS and found["machine"] == "mine"
    assert (found["completed"], found["failed"]) == (12, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (240, 96)
    assert found["max_concurrent_requests"] <= 3 and found["request_goodput"] == found["request_throughput"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert all(found[f"{figure}_{name}_ms"] >= 0 for figure in ("mean", "median", "std", "p99"))
    assert found["output_lens"] == [8] * 12 and len(found["generated_texts"]) == 12
    out = capsys.readouterr().out
    assert out.startswith("============ Serving Benchmark Result ============\n")
    assert "Successful requests:                     12        \n" in out
    assert "Maximum request concurrency:             3         \n" in out
    assert "Mean E2EL (ms):" in out and "Share" not in out


@pytest.mark.parametrize(
    "flags",
    [
        ["--backend", "openai-chat"],
        ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "64"],
        ["--request-rate", "100", "--burstiness", "0.5", "--num-warmups", "2"],
        ["--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "500"],
        ["--temperature", "0.5", "--top-k", "5", "--extra-body", '{"seed": 3}', "--request-id-prefix", "a-"],
    ],
    ids=lambda flags: flags[0] + flags[1],
)
def test_ways_to_load(dry: Server, tmp_path: Path, flags: list[str]) -> None:
    found = bench(dry, tmp_path, *SMALL, *flags)
    assert (found["completed"], found["total_output_tokens"]) == (12, 96)
    assert found["cached_tokens"] > 0 or "prefix_repetition" not in flags


def test_recorded_loads(dry: Server, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,40,10\n2023-11-16 18:17:04.1,30,5\n"
        "2023-11-16 18:17:04.2,9000,5\n"
    )
    found = bench(dry, tmp_path, "--trace", str(trace), "--trace-scale", "2")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (70, 15)
    assert found["duration"] >= 0.1
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "Once upon a time", "output_tokens": 3}\n')
    found = bench(
        dry, tmp_path, "--dataset-name", "custom", "--dataset-path", str(lines), "--num-prompts", "2"
    )
    assert found["completed"] == 2 and found["total_output_tokens"] <= 6


def test_a_load_test_over_users(dry: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "users.png"
    lengths = ["--input-len", "8", "--output-len", "4"]
    found = bench(dry, tmp_path, "--users", "1", "2", "4", *lengths, "--plot", str(plot))
    assert [(one["max_concurrency"], one["completed"]) for one in found["levels"]] == [
        (1, 4),
        (2, 4),
        (4, 8),
    ]
    assert plot.stat().st_size > 1000
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_results_are_kept(dry: Server, tmp_path: Path) -> None:
    flags = [
        "--save-result",
        "--append-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "all.jsonl",
    ]
    for _ in range(2):
        bench(dry, tmp_path, *SMALL, *flags)
    assert [json.loads(line)["completed"] for line in (tmp_path / "all.jsonl").read_text().splitlines()] == [
        12,
        12,
    ]


def test_what_cannot_be_run(dry: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        silent = str(probe.getsockname()[1])  # nobody else gets it meanwhile
        for flags, said in (
            (["--port", silent], "no server answers at http://127.0.0.1:"),
            (["--dataset-name", "sharegpt"], "--dataset-path"),
            (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
            (["--users", "4", "--request-rate", "3"], "--max-concurrency"),
            (["--header", "x"], "KEY=VALUE"),
            (["--num-prompts", "0"], "num_prompts"),
            (["--random-range-ratio", "1"], "random_range_ratio"),
            (["--base-url", dry.url, "--num-prompts", "2", "--input-len", "9000"], "max_model_len"),
        ):
            assert main(["bench", "serve", *flags]) in (1, 2)
            assert said in capsys.readouterr().err


def test_keys_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("demo", "--dry-run", "--api-key", "secret") as server:
        assert main(["bench", "serve", "--base-url", server.url]) == 2
        assert "OPENAI_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert bench(server, tmp_path, *SMALL)["completed"] == 12
