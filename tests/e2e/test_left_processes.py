"""A program that ends, in whatever way and at whatever time, leaves no engine process and no rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from processes import await_end, marked

MARK = "QUIRE_TEST_PROGRAM"
PROGRAM = """
import sys
from quire import LLM, SamplingParams
settings = {"device": "cpu", "cpu_threads": 1, "max_model_len": 128, "kv_cache_memory": 1 << 23}
llm = LLM("demo", **settings, tensor_parallel_size=2)
stream = llm.stream("Once upon a time", SamplingParams(max_tokens=100, ignore_eos=True))
next(stream)
print("generating", flush=True)
END
"""
ENDS = {
    "an error": 'raise ValueError("of the caller")',
    "sys.exit": "sys.exit(3)",
    "a signal": "while True: llm.generate('x', use_tqdm=False)",
}
in_long_runs = pytest.mark.skipif(
    os.environ.get("QUIRE_ALL_RANKS") != "1", reason="`make test-ranks` ends programs in all ways"
)


@contextmanager
def program(end: str, value: str) -> Iterator[subprocess.Popen[str]]:
    """Run the program until the context is left; it must have ended by then, and so must all that it started."""
    command = [sys.executable, "-c", PROGRAM.replace("END", end)]
    running = subprocess.Popen(
        command,
        env={**os.environ, MARK: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start background jobs, such as a test run, with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield running
        assert running.wait(30) != 0
        assert await_end(MARK, value) == []
    finally:
        running.kill()
        running.communicate()
        await_end(MARK, value)


def await_rank(value: str) -> None:
    """Wait until a rank has been started."""
    end_s = time.monotonic() + 60
    while not marked(MARK, value, ("quire.rank_process",)):
        assert time.monotonic() < end_s, "no rank is started"
        time.sleep(0.02)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("delay_s", [0.0, pytest.param(1.5, marks=in_long_runs)])
def test_a_signal_during_the_start_up(sign: signal.Signals, delay_s: float) -> None:
    value = f"{os.getpid()} {sign} {delay_s}"
    with program(ENDS["a signal"], value) as running:
        await_rank(value)
        time.sleep(delay_s)
        running.send_signal(sign)


@pytest.mark.parametrize(
    ("end", "sign"),
    [
        ("an error", None),
        pytest.param("sys.exit", None, marks=in_long_runs),
        *(
            pytest.param("a signal", sign, marks=in_long_runs)
            for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        ),
    ],
)
def test_an_end_while_it_generates(end: str, sign: signal.Signals | None) -> None:
    with program(ENDS[end], f"{os.getpid()} {end} {sign}") as running:
        assert running.stdout is not None and running.stdout.readline() == "generating\n"
        if sign is not None:
            running.send_signal(sign)
