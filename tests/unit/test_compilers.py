"""Processes that compile kernels: what the engine sees of them, and how they end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from quire import compilers as module
from quire.compilers import NO_COMPILERS, Compilers, start_compilers, usual_count

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def process(answers: dict[bytes, str], connection: Connection) -> None:
    """Answer jobs, and end at one that is not in `answers`."""
    while (job := connection.recv_bytes()) in answers:
        connection.send_bytes(answers[job].encode())
    connection.close()


def started(count: int, answers: dict[bytes, str]) -> Compilers:
    pairs = [Pipe() for _ in range(count)]
    for _, theirs in pairs:
        threading.Thread(target=process, args=(answers, theirs), daemon=True).start()
    return Compilers([ours for ours, _ in pairs])


def test_without_processes_nothing_is_compiled_elsewhere() -> None:
    assert not NO_COMPILERS.compile("kernel", b"job") and NO_COMPILERS.count == 0
    assert start_compilers(0) is NO_COMPILERS


def test_a_process_that_ends_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    compilers = started(2, {b"good": "", b"bad": "TypeError: no"})
    assert compilers.compile("k", b"good") and not compilers.compile("k", b"bad")
    assert not caplog.messages
    assert not compilers.compile("deadly", b"unknown")
    assert "deadly" in caplog.text
    assert compilers.compile("k", b"good"), "the other process still answers"
    assert not compilers.compile("deadly", b"unknown") and not compilers.compile("k", b"good")


def test_the_process_that_is_forked_first_is_asked_first() -> None:
    (ours, first), (others, second) = Pipe(), Pipe()
    first.send_bytes(b"")  # its answer
    assert Compilers([ours, others]).compile("k", b"job")
    assert first.recv_bytes() == b"job" and not second.poll()


def test_a_process_that_hangs_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    ours, theirs = Pipe()
    compilers = Compilers([ours])
    assert not compilers.compile("k", b"job")
    theirs.recv_bytes()
    with pytest.raises(EOFError):
        theirs.recv_bytes()


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(24)), raising=False)
    assert [usual_count(ranks) for ranks in (1, 2, 4, 8)] == [16, 12, 6, 0]
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert usual_count(1) == 0


@linux
def test_triton_hashes_its_files_while_torch_is_imported() -> None:
    """A fork would lose the thread, and each of the other processes would hash them again."""
    pytest.importorskip("triton")
    code = (
        "import sys, threading; from quire import compile_process as c; print('torch' in sys.modules); c.prepare(); "
        "print('torch' in sys.modules, c.triton_key.cache_info().currsize, threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True 1 1"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def await_true(condition: object, timeout_s: float = 120.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.05)


@linux
@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_processes_end_with_the_engine(end: str) -> None:
    pytest.importorskip("triton")
    code = (
        "import sys; from quire.compilers import start_compilers; c = start_compilers(2); "
        "print(c.compile('k', b'no job'), flush=True); sys.stdin.readline(); c.close(); sys.stdin.readline()"
    )
    engine = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdin and engine.stdout
    try:
        assert engine.stdout.readline() == b"False\n", "the process reports that the job is none, and lives"
        first = children_of(engine.pid)
        await_true(lambda: len(children_of(first[0])) == 2)  # the first answers before the second is there
        workers = children_of(first[0])
        assert len(first) == 1 and len(workers) == 2
        assert all(len(list(Path(f"/proc/{pid}/task").iterdir())) == 1 for pid in (*first, *workers))
        if end == "kill":
            engine.kill()
        else:
            engine.stdin.write(b"\n")
            engine.stdin.flush()
        await_true(lambda: all(map(ended, [*first, *workers])))
        if end == "close":
            assert engine.poll() is None
            await_true(lambda: not children_of(engine.pid))  # no zombie
    finally:
        engine.kill()
        engine.wait()
