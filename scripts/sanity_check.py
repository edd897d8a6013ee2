"""Run every supported model family through `quire generate`, `serve` and `bench` on tiny random weights.

python scripts/sanity_check.py [FAMILY ...] [--jobs N]

Checkpoints of a few thousand parameters are written by transformers, so it needs the test tools (`make test` installs
them). A family passes if all three commands succeed and the server answers with the tokens of `generate`. Run it after a
change to models, layers or the loading of checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "golden")]

from test_families import CASES, make_reference  # noqa: E402

PROMPT, COUNT = [5, 17, 3, 88, 42, 9], 8
SETTINGS = ["--device", "cpu", "--max-model-len", "48", "--skip-tokenizer-init", "--cpu-threads", "1"]
QUIRE = [sys.executable, "-m", "quire"]
START_S = 90.0


class CheckFailed(Exception):
    """A command failed, or two commands disagree."""


@dataclass(frozen=True)
class Checked:
    """The outcome of one family."""

    name: str
    seconds: float
    problem: str = ""  # empty if everything passed


def first_cases() -> dict[str, str]:
    """Return the first test case of each class of transformers, by the name of the class."""
    return {name: case for case, (name, _) in reversed(CASES.items())}


def check(name: str, case: str) -> Checked:
    """Run all commands for one family."""
    begin, problem = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_reference(case, Path(folder))
            tokens = _generate(folder)
            if (served := _serve(folder)) != tokens:
                raise CheckFailed(f"serve answers {served}, generate {tokens}")
            _run("bench", "latency", folder, *SETTINGS, "--input-len", "8", "--output-len", "4", "--num-iters", "1", "--num-iters-warmup", "0")  # fmt: skip
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return Checked(name, time.monotonic() - begin, problem)


def _run(*command: str) -> str:
    ended = subprocess.run([*QUIRE, *command], capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise CheckFailed(f"quire {command[0]} ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")
    return ended.stdout


def _generate(folder: str) -> list[int]:
    program = (
        "import json, sys; from quire import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device='cpu', max_model_len=48, skip_tokenizer_init=True, cpu_threads=1)\n"
        f"params = SamplingParams(temperature=0, max_tokens={COUNT}, ignore_eos=True)\n"
        f"outs = llm.generate([{{'prompt_token_ids': {PROMPT}}}], params, use_tqdm=False)\n"
        "print(json.dumps(outs[0].outputs[0].token_ids))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=300
    )
    if ended.returncode:
        raise CheckFailed(f"LLM.generate failed: {ended.stderr.strip()[-300:]}")
    tokens: list[int] = json.loads(ended.stdout)
    return tokens


def _serve(folder: str) -> list[int]:
    """Start a server, ask it once and stop it. Return the tokens of its answer."""
    command = [*QUIRE, "serve", folder, *SETTINGS, "--port", "0", "--served-model-name", "tiny"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            url = f"{_address(server, log)}/v1/completions"
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
            return tokens
        finally:
            server.terminate()
            server.wait(30)


def _address(server: subprocess.Popen[bytes], log: IO[str]) -> str:
    """Return the address that the server prints once it is ready."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        log.seek(0)
        for word in log.read().split():
            if word.startswith("http://"):
                return word
        time.sleep(0.1)
    log.seek(0)
    raise CheckFailed(f"quire serve did not start: {log.read().strip()[-300:]}")


def main() -> int:
    cases = first_cases()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="*", help=f"of {', '.join(sorted(cases))}; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="families checked side by side")
    args = parser.parse_args()
    if unknown := set(args.family) - set(cases):
        parser.error(f"unknown family {sorted(unknown)[0]!r}")
    names = args.family or sorted(cases)
    failed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for index, done in enumerate(pool.map(lambda name: check(name, cases[name]), names), 1):
            failed += bool(done.problem)
            result = done.problem or "passed"
            print(f"{index:3}/{len(names)}  {done.name:20} {done.seconds:6.1f} s  {result}", flush=True)
    print(f"{len(names) - failed} of {len(names)} families passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
