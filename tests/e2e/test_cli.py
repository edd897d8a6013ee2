"""The `quire` command on the demo model, as a user types it."""

from __future__ import annotations

import gzip
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.cli.main import main
from quire.quant.packed import can_pack


def quire(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quire", *args], input=stdin, capture_output=True, text=True)


def test_generate_streams_and_sums_up() -> None:
    done = quire("generate", "--summary", "--temperature", "0", "--max-tokens", "20", "Once upon a time")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time ")
    for word in ("tokens      ", "speed ", "first token", "start-up"):
        assert word in done.stdout


def test_a_log_level_that_there_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    assert main(["generate", "Once"]) == 2
    assert "QUIRE_LOG_LEVEL must be debug, info, warning or error, got 'loud'" in capsys.readouterr().err


def test_generate_repeats_with_a_seed() -> None:
    runs = {quire("generate", "--seed", "5", "--max-tokens", "20", "Once").stdout for _ in range(2)}
    other = quire("generate", "--seed", "6", "--max-tokens", "20", "Once").stdout
    assert len(runs) == 1 and other not in runs


def test_chat_over_several_turns() -> None:
    done = quire("chat", "--temperature", "0", stdin="What is 3 + 4?\nWhat is 20 - 5?\n/reset\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert "3 + 4 = 7" in done.stdout and "20 - 5 = 15" in done.stdout
    first, second = (line for line in done.stderr.splitlines() if "from the prefix cache]" in line)
    assert "tokens/s" not in done.stdout, "only answers go to standard output"
    assert "; 0 of " in first and "; 0 of " not in second, "the second turn reuses the first"


def test_doctor_says_what_and_why() -> None:
    done = quire("doctor", "--load", "--device", "cpu", "--kv-layout", "contiguous")
    assert done.returncode == 0, done.stderr
    for word in (
        "torch",
        "10.4 M parameters",
        "cpu: as set",
        "contiguous",
        "weights",
        "blocks of 2048 tokens",
        "Start-up",
    ):
        assert word in done.stdout


def test_doctor_says_that_products_are_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.kernels.cpu import compiled_kernels

    if compiled_kernels() is None:
        pytest.skip("no C compiler")
    doctor = ["doctor", "--device", "cpu", "--dtype", "float32"]
    assert main(doctor) == 0 and "C, for small steps" in capsys.readouterr().out
    monkeypatch.setattr("quire.quant.packed.find_packed", lambda packed, weight: None)
    assert main(doctor) == 0 and "torch computes matrix products, which is slower" in capsys.readouterr().out


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "demo", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["quire"]["version"] and found["machine"]["memory"]["total_bytes"] > 1 << 28
    assert found["plan"]["prefix_caching"] is True and found["plan"]["max_num_seqs"] == 32
    parameters = 10_420_224
    assert found["memory_map"]["weights"]["bytes"] == parameters * (2 if can_pack(torch.bfloat16) else 4)
    assert main(["doctor", "/no/such/model", "--json"]) == 1
    out, err = capsys.readouterr()
    assert (
        "/no/such/model" in json.loads(out)["error"] and json.loads(out)["machine"] and err.count("\n") == 1
    )


def test_the_model_is_the_first_word() -> None:
    done = quire("generate", "demo", "--temperature", "0", "--max-tokens", "3", "Once upon")
    assert done.returncode == 0 and done.stdout.startswith("Once upon a time"), done.stderr
    done = quire("run", "demo", "What is 3 + 4?", "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, "3 + 4 = 7\n") and "tokens/s" in done.stderr


def test_bench_host() -> None:
    done = quire("bench", "host", "--rows", "16", "--steps", "50")
    assert done.returncode == 0 and "16 decode rows" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["bench", "latency", "--batch-size", "1", "0"], "batch_size must be at least 1, got 0"),
        (["bench", "latency", "--num-iters-warmup", "-1"], "num_iters_warmup must be at least 0, got -1"),
        (["bench", "host", "--rows", "0"], "rows must be at least 1, got 0"),
        (["bench", "host", "--steps", "0"], "steps must be at least 1, got 0"),
        (
            ["profile", "--input-len", "3000"],
            "input_len 3000 leaves no room for output in max_model_len 2048; lower it",
        ),
    ],
)
def test_numbers_that_nothing_can_be_measured_with(
    capsys: pytest.CaptureFixture, tmp_path: Path, args: list[str], says: str
) -> None:
    more = ["--trace-file", str(tmp_path / "trace.json")] if args[0] == "profile" else []
    assert main([*args, *more]) == 2
    assert capsys.readouterr().err == f"quire: {says}\n"


def test_bench_throughput(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    load = ["--num-prompts", "5", "--input-len", "20", "--output-len", "6", "--request-rate", "50"]
    figures = ["--goodput", "ttft:1e6", "--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,90"]
    kept = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "kept"), "--label", "try"]
    done = quire("bench", "throughput", *load, *figures, *kept, "--output-json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["total_input_tokens"] == 100 and found["total_output_tokens"] == 30
    assert found["tokens_per_second"] == 130 / found["elapsed_time"]
    assert found["request_rate"] == 50 and found["share_of_limit"] > 0 and found["elapsed_time"] >= 0.1
    for line in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     5 ",
        "Request rate configured (RPS):           50.00",
        "Request goodput (req/s):",
        "---------------Time to First Token----------------",
        "P90 ITL (ms):",
        "Share of limit (%):",
        "Throughput: ",
        "Total num output tokens:  30",
    ):
        assert line in done.stdout, line
    assert "TPOT" not in done.stdout
    (detailed,) = (tmp_path / "kept").glob("try-50.0qps-demo-*.json")
    assert json.loads(detailed.read_text())["output_lens"] == [6] * 5


def test_bench_latency_of_one_batch_size_and_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    few = ["--input-len", "20", "--output-len", "6", "--num-iters-warmup", "1", "--num-iters", "3"]
    done = quire("bench", "latency", *few, "--batch-size", "2", "--output-json", str(file))
    assert done.returncode == 0 and "99% percentile latency" in done.stdout, done.stderr
    assert len(json.loads(file.read_text())["latencies"]) == 3
    assert main(["bench", "latency", *few, "--batch-size", "1", "2", "--output-json", str(file)]) == 0
    assert "of limit" in capsys.readouterr().out
    assert [one["batch_size"] for one in json.loads(file.read_text())["batches"]] == [1, 2]
    lists = [
        "--input-len",
        "5",
        "20",
        "--output-len",
        "2",
        "3",
        "--num-iters-warmup",
        "0",
        "--num-iters",
        "1",
    ]
    assert main(["bench", "latency", *lists, "--batch-size", "1", "--output-json", str(file)]) == 0
    points = [(one["input_len"], one["output_len"]) for one in json.loads(file.read_text())["batches"]]
    assert points == [(5, 2), (5, 3), (20, 2), (20, 3)]
    assert main(["bench", "latency", *lists, "--plot", "sweep.png"]) != 0
    assert "plot takes one input_len" in capsys.readouterr().err


def test_bench_memory_compares_the_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "found.json", tmp_path / "found.svg"
    few = ["--input-len", "60", "--output-len", "12", "--batch-sizes", "2", "8", "16"]
    assert main(["bench", "memory", "demo", *few, "--plot", str(plot), "--output-json", str(file)]) == 0
    assert "contiguous" in capsys.readouterr().out and plot.read_text().count("<svg") == 1
    found = {(one["layout"], one["batch_size"]): one for one in json.loads(file.read_text())["layouts"]}
    assert [found["contiguous", size]["held"] for size in (2, 8, 16)] == [2, 8, 8], (
        "room for 8 of full length"
    )
    assert found["paged", 16]["held"] > 8
    for one in found.values():
        assert 0 < one["used_bytes"] <= one["reserved_bytes"] <= one["pool_bytes"]
        assert one["wasted_bytes"] == one["reserved_bytes"] - one["used_bytes"]
    assert found["paged", 8]["wasted_bytes"] < found["contiguous", 8]["wasted_bytes"] / 2


def test_a_sweep_that_is_interrupted_keeps_its_finished_levels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.bench import offline

    file, measure = tmp_path / "found.json", offline.latency

    def latency(bench: object, size: int, *rest: object) -> object:
        if size == 4:
            raise KeyboardInterrupt
        return measure(bench, size, *rest)

    monkeypatch.setattr(offline, "latency", latency)
    few = ["--input-len", "20", "--output-len", "6", "--num-iters-warmup", "0", "--num-iters", "1"]
    sweep = ["bench", "latency", "demo", *few, "--output-json", str(file), "--batch-size"]
    assert main([*sweep, "1", "2", "4"]) == 130
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and "the results hold the 2 finished levels" in err
    assert [one["batch_size"] for one in json.loads(file.read_text())["batches"]] == [1, 2]
    file.unlink()
    assert main([*sweep, "4", "1"]) == 130
    assert not file.exists(), "there is nothing to keep"


def test_bench_replays_a_trace_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "plots" / "found.svg"
    row = {"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps({**row, "timestamp": 1000 * i}) for i in range(4)))
    scale = ["--trace-scale", "10", "--num-prompts", "3"]
    assert main(["bench", "throughput", "--trace", str(trace), *scale, "--plot", str(plot)]) == 0
    assert "Total input tokens:                      1800" in capsys.readouterr().out
    assert plot.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "prefill"], "3586 tokens, but max_model_len is 2048"),
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--trace", "x", "--request-rate", "1"], "a trace has its own arrival times"),
        (["--trace", "/no/such/x"], "cannot read /no/such/x"),
        (["--num-prompts", "0"], "num_prompts must be at least 1"),
        (["--goodput", "itl:3"], "goodput must be"),
        (["--plot", "x.txt"], "plot must end in .png, .svg, .pdf"),
        (
            ["--num-prompts", "1", "--output-len", "1", "--output-json", "/dev/null/x"],
            "cannot write /dev/null/x",
        ),
    ],
)
def test_bench_refuses_what_cannot_be(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", *flags]) == 2
    assert message in capsys.readouterr().err


def test_bench_startup() -> None:
    done = quire("bench", "startup", "--num-iters", "1")
    assert done.returncode == 0, done.stderr
    for phase in ("total", "import", "weights", "first_token"):
        assert phase in done.stdout


def test_profile(tmp_path: Path) -> None:
    trace, tables = tmp_path / "trace.json.gz", tmp_path / "tables.json"
    files = ["--trace-file", str(trace), "--output-json", str(tables)]
    done = quire("profile", "--batch-size", "2", "--input-len", "16", "--steps", "4", *files)
    assert done.returncode == 0, done.stderr
    for line in (
        "decode of 2 rows",
        "of limit",
        "host ",
        "matrix products",
        "gate_up",
        "operator ",
        "memory",
        "free",
    ):
        assert line in done.stdout, line
    assert json.loads(tables.read_text())["steps"] == 4
    assert "traceEvents" in json.loads(gzip.decompress(trace.read_bytes()))


def test_the_sanity_check_of_a_family(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers writes the checkpoints")
    script = str(Path(__file__).resolve().parents[2] / "scripts" / "sanity_check.py")
    done = subprocess.run([sys.executable, script, "Llama"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 of 1 families passed" in done.stdout, done.stdout + done.stderr
    monkeypatch.setattr(sys, "argv", [script, "Lama"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as wrong:
        runpy.run_path(script)["main"]()
    assert wrong.value.code == 2 and "unknown family 'Lama'" in capsys.readouterr().err


def test_a_plan_says_which_rate_is_sustained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    load = ["--input-len", "120", "--output-len", "10", "--num-prompts", "24", "--max-num-seqs", "8"]
    targets = ["--target", "ttft=20s,itl=5s"]
    assert main(["plan", "demo", *load, *targets, "--gpus", "2", "--output-json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "target_itl 5000" in out and "2 sustain" in out
    plans = json.loads(file.read_text())["plans"]
    assert len(plans) >= 3 and all(one["requests_per_s"] > 0 and one["ttft_ms"] <= 20_000 for one in plans)
    assert main(["plan", "demo", *load, "--target", "ttft=0.001ms"]) == 1
    assert "No setting meets the targets" in capsys.readouterr().out
    assert main(["plan", "demo", "--target", "soon"]) == 2
    assert "target must be such as" in capsys.readouterr().err
