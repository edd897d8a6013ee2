"""Bad input on the command line: one sentence on stderr that names the fault, a non-zero exit code, no traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from tiny import CONFIG, write_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Run the command; return its exit code and stderr."""
    try:
        code = main(list(args))
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], text: str, *args: str) -> None:
    code, err = run(capsys, *args)
    assert code in (1, 2), (code, err)
    assert text in err, err
    assert "Traceback" not in err and len([line for line in err.splitlines() if line.strip()]) == 1, err


def generate(folder: Path, *more: str) -> list[str]:
    return ["generate", "--model", str(folder), "--max-tokens", "3", *more]


def test_the_tiny_model_itself_works(capsys, folder: Path) -> None:
    code, err = run(capsys, *generate(folder, "hello"))
    assert (code, err) == (0, "")


def test_unknown_model(capsys, folder: Path) -> None:
    refused(capsys, "/no/such/model", *generate(Path("/no/such/model"), "x"))
    refused(capsys, "some-org/some-model", "generate", "--model", "some-org/some-model", "x")


def test_no_model_folder(capsys, tmp_path: Path) -> None:
    refused(capsys, "config.json", *generate(tmp_path, "x"))
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    refused(capsys, "not a .gguf file", *generate(file, "x"))


def test_truncated_safetensors(capsys, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(capsys, "model.safetensors is not a readable safetensors file", *generate(folder, "x"))


def test_pointers_of_git_lfs(capsys, folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4000\n"
    (folder / "model.safetensors").write_text(pointer)
    refused(capsys, "fetch them with git lfs pull", *generate(folder, "x"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, os.urandom(4096)])
def test_corrupt_gguf(capsys, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    refused(capsys, "model.gguf", *generate(file, "x"))


def test_names_that_the_system_refuses(capsys, folder: Path) -> None:
    long = "x" * 5000
    refused(capsys, "File name too long", *generate(Path(long), "x"))
    refused(capsys, "File name too long", *generate(folder, "--tokenizer", long, "x"))
    refused(capsys, "home directory", *generate(Path("~no-such-user/model"), "x"))
    index = {"weight_map": {"model.norm.weight": long}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(capsys, "File name too long", *generate(folder, "x"))


def test_an_error_of_the_system_names_the_file(capsys, folder: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("quire.cli.generate.run", refuse)
    refused(capsys, "/some/file cannot be used: Permission denied", *generate(folder, "x"))


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "startup", "--output-json"],
        ["bench", "throughput", "--plot"],
        ["bench", "serve", "--save-result", "--result-dir"],
        ["ladder", "--report"],
        ["profile", "--trace-file"],
        ["quantize", "--format", "int4", "demo"],
    ],
)
def test_results_that_cannot_be_written_are_refused_before_the_work(capsys, args: list[str]) -> None:
    begin_s = time.process_time()
    refused(capsys, "cannot write /dev/null/x.svg: Not a directory", *args, "/dev/null/x.svg")
    assert time.process_time() - begin_s < 5


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["bench", "throughput", "--workload-scale", "inf"], "workload_scale must be finite, got inf"),
        (["bench", "sessions", "--workload-scale", "inf"], "workload_scale must be finite, got inf"),
        (["bench", "serve", "--trace-scale", "inf"], "trace_scale must be finite, got inf"),
        (["bench", "throughput", "--trace-scale", "nan"], "trace_scale must be above 0, got nan"),
        (["plan", "--request-rate", "nan"], "request_rate must be above 0, got nan"),
    ],
)
def test_rates_and_scales_that_are_no_numbers(capsys, args: list[str], text: str) -> None:
    refused(capsys, text, *args)


@pytest.mark.parametrize("value", ["[", "[]", "5"])
def test_more_fields_of_a_benchmark_are_an_object(capsys, value: str) -> None:
    code, err = run(capsys, "bench", "serve", "--extra-body", value)
    assert code == 2 and f"--extra-body: must be a JSON object, got '{value}'" in err


@pytest.mark.parametrize(
    ("flag", "limit"),
    [
        ("--cpu-threads", 1024),
        ("--tensor-parallel-size", 64),
        ("--pipeline-parallel-size", 64),
        ("--data-parallel-size", 1024),
    ],
)
def test_more_threads_and_processes_than_a_machine_can_have(capsys, flag: str, limit: int) -> None:
    name = flag[2:].replace("-", "_")
    refused(capsys, f"{name} must be at most {limit}, got 100000", "generate", "x", flag, "100000")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--group-size", "0"], "group_size must be at least 1, got 0"),
        (["--group-size", "-64"], "group_size must be at least 1, got -64"),
        (["--calibration-tokens", "0"], "calibration_tokens must be at least 1, got 0"),
    ],
)
def test_quantize_refuses_numbers(capsys, tmp_path: Path, flags: list[str], text: str) -> None:
    refused(capsys, text, "quantize", "demo", str(tmp_path / "out"), "--format", "int4", *flags)


def test_quantize_on_a_full_disk(capsys, folder: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    out = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        command = ("quantize", str(folder), str(out), "--format", "int4", "--group-size", "16")
        refused(capsys, f"{out} cannot be written: ", *command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(capsys, "has no config.json", *generate(out, "x"))


def change(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_surplus_and_misshaped_tensors(capsys, folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    original = (folder / "model.safetensors").read_bytes()
    change(folder, lambda t: t.pop(name))
    refused(capsys, f"no tensor {name}", *generate(folder, "x"))
    (folder / "model.safetensors").write_bytes(original)
    change(folder, lambda t: t.update({name: t[name][:-1].clone()}))
    refused(capsys, f"{name} has shape [47, 32], but the config asks for [48, 32]", *generate(folder, "x"))
    (folder / "model.safetensors").write_bytes(original)
    change(folder, lambda t: t.update({"model.extra.weight": t[name].clone()}))
    refused(capsys, "model.extra.weight", *generate(folder, "x"))


def test_pickles_are_not_read(capsys, folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    refused(capsys, "convert them to safetensors", *generate(folder, "x"))


def test_config_that_is_no_json_or_not_supported(capsys, folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(capsys, "config.json", *generate(folder, "x"))
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    refused(capsys, "MambaForCausalLM", *generate(folder, "x"))
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}})
    )
    refused(capsys, "spiral", *generate(folder, "x"))


def test_weights_that_do_not_fit(capsys, folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "hidden_size": 1 << 16, "intermediate_size": 1 << 22})
    )
    refused(
        capsys, "GiB are free on cpu", *generate(folder, "--load-format", "dummy", "--device", "cpu", "x")
    )


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--max-tokens", "0", "x"], "max_tokens must be between 1 and"),
        (["--temperature", "-1", "x"], "temperature must be in"),
        (["--block-size", "0", "x"], "block_size must be an integer of at least 1"),
        (["--max-model-len", "1000", "x"], "max_model_len 1000 exceeds the 256 positions"),
        (["--kv-cache-memory", "100", "x"], "KV cache"),
        (["--kv-layout", "none", "--prefix-caching", "x"], "prefix_caching needs a KV cache"),
        (["--device", "tpu", "x"], "device must be auto, cpu, cuda"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["--stop-token-ids", "9999", "x"], "stop_token_ids"),
        (["x" * 300], "prompt has 300 tokens, but max_model_len is 256"),
        (["   "], "the input is empty"),
    ],
)
def test_bad_values(capsys, folder: Path, args: list[str], text: str) -> None:
    refused(capsys, text, *generate(folder, *args))


def test_bad_flags_say_which(capsys, folder: Path) -> None:
    for args, text in (
        (["--kv-layout", "woven"], "invalid choice: 'woven'"),
        (["--max-num-seqs", "many"], "must be an integer, got 'many'"),
        (["--max-num-seqs", "infk"], "must be an integer, got 'infk'"),
        (["--no-such-flag"], "--no-such-flag\n`quire generate --help` lists the flags"),
        (["--gpu-memory-utilization", "0.5"], "here it is --memory-utilization"),
        (["--enable-prefix-caching"], "here it is --prefix-caching"),
        (["--dtipe=auto"], "did you mean --dtype?"),
    ):
        code, err = run(capsys, *generate(folder, "x", *args))
        assert code == 2 and text in err and "Traceback" not in err and len(err.splitlines()) == 2


def interruptible(command: list[str]) -> subprocess.Popen[str]:
    """A process of `python -m quire` that hears SIGINT, also if this one ignores it, as behind a shell's `&`."""
    return subprocess.Popen(
        [sys.executable, "-m", "quire", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_interruption_ends_cleanly(folder: Path) -> None:
    process = interruptible(generate(folder, "x", "--max-tokens", "250", "--ignore-eos", "--n", "60"))
    # Processor time, because Python may start slowly on busy cores; a fast one may be done before.
    while process.poll() is None and psutil.Process(process.pid).cpu_times().user < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (0, 130) and "Traceback" not in err


def test_interruption_of_a_benchmark_of_processes() -> None:
    process = interruptible(["bench", "startup", "--num-iters", "50"])
    for _ in range(200):
        time.sleep(0.05)
        if children := psutil.Process(process.pid).children():
            break
    time.sleep(0.5)  # until it is waited for
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err == "quire: interrupted\n"
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc shows what a process has loaded")
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 3.0])
def test_interruption_at_any_time(folder: Path, tmp_path: Path, delay_s: float) -> None:
    """From the moment torch begins to load to the middle of a long job."""
    prompts = tmp_path / "prompts"
    prompts.write_text("x\n" * 4000)
    process = interruptible(generate(folder, "--file", str(prompts), "--max-tokens", "250", "--ignore-eos"))
    deadline = time.monotonic() + 60
    while "torch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "quire: interrupted\n")


def test_lines_of_standard_input_to_json_lines(folder: Path) -> None:
    command = [sys.executable, "-m", "quire", *generate(folder, "--json", "--temperature", "0", "--n", "2")]
    done = subprocess.run(command, input="first\n\nsecond\n", capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["prompt"], r["index"]) for r in records] == [
        ("first", 0),
        ("first", 1),
        ("second", 0),
        ("second", 1),
    ]


# ----------------------------------------------------------------------------------- odd streams


def piped(
    *args: str, stdin: bytes | None = b"", stdout: int | None = subprocess.PIPE, **env: str
) -> tuple[int, str, str]:
    """Exit code, output and errors of the command with `stdin`; None: that stream is closed."""
    command = [sys.executable, "-m", "quire", *args]
    if stdin is None:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    done = subprocess.run(
        command, input=stdin, stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **env}, timeout=120
    )
    return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()


@pytest.mark.parametrize(
    "args", [["generate", "--json", "Hi"], ["generate", "Hi"], ["generate", "Hi", "Ho"], ["doctor"], ["chat"]]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(folder: Path, args: list[str], unbuffered: str) -> None:
    tokens = [] if args == ["doctor"] else ["--max-tokens", "2"]
    with open("/dev/full", "wb") as full:
        command = [*args, "--model", str(folder), *tokens]
        code, _, err = piped(*command, stdin=b"Hi\n", stdout=full.fileno(), PYTHONUNBUFFERED=unbuffered)
    assert (code, err) == (1, "quire: the output cannot be written: No space left on device\n")


def test_a_closed_input_is_an_empty_one(folder: Path) -> None:
    code, _, err = piped("generate", "--model", str(folder), stdin=None)
    assert (code, err) == (2, "quire: no prompt: the input is empty\n")
    code, out, err = piped("chat", "--model", str(folder), stdin=None)
    assert (code, out, err) == (0, "", "")


def test_letters_that_an_encoding_does_not_have(folder: Path) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    code, out, err = piped(*generate(folder, "été"), **ascii_only)
    assert (code, err) == (0, "") and out.startswith("?t?")
    code, out, err = piped(*generate(folder, "été", "--json"), **ascii_only)
    assert (code, err) == (0, "") and json.loads(out)["prompt"] == "été"
    code, _, err = piped(*generate(folder), stdin=b"caf\xe9\n")
    assert code == 2 and err.startswith(
        "quire: cannot read standard input: 'utf-8' codec can't decode byte 0xe9"
    )


def test_a_prompt_that_is_refused_is_not_echoed(folder: Path) -> None:
    code, out, err = piped(*generate(folder, "Hi", "--regex", "("))
    assert code == 2 and out == "" and err.startswith("quire: regex")


@pytest.mark.parametrize("value", ["[1]", "x", "5"])
def test_a_flag_that_takes_an_object(capsys, value: str) -> None:
    assert run(capsys, "generate", "--logit-bias", value, "Hi")[1].startswith(
        f"quire generate: error: argument --logit-bias/--logit_bias: must be a JSON object, got '{value}'"
    )


def test_an_empty_flag_of_structured_output_is_not_left_out(capsys, folder: Path) -> None:
    refused(capsys, "regex must not be empty", *generate(folder, "Hi", "--regex", ""))
