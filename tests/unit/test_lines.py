"""Log lines: written by a thread, dropped and counted if the output is not read."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from quire.serve.observe import line_writer as lines_module
from quire.serve.observe.line_writer import LineWriter
from quire.serve.observe.logs import set_up_logging
from quire.serve.settings import ServeConfig


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Return both ends of a pipe that replaces standard output and standard error."""
    monkeypatch.setattr(lines_module, "_REPORT_S", 0.02)
    read, write = os.pipe()
    real = os.write
    monkeypatch.setattr(os, "write", lambda to, data: real(write if to in (1, 2) else to, data))
    yield read, write
    os.close(read)
    os.close(write)


def read_until(read: int, ending: bytes) -> bytes:
    found = b""
    while ending not in found:
        found += os.read(read, 1 << 20)
    return found


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    writer = LineWriter()
    for number in range(2000):
        writer.write(f"line {number}", 1 + number % 2)
    writer.close()
    assert read_until(pipe[0], b"1999\n") == b"".join(b"line %d\n" % n for n in range(2000))
    assert writer.dropped == 0
    writer.write("late")
    assert writer.dropped == 1


def test_a_reader_that_stalls_delays_nobody(pipe: tuple[int, int]) -> None:
    writer = LineWriter()
    began_s = time.monotonic()
    for _ in range(40):
        writer.write("x" * 65_536)
    assert time.monotonic() - began_s < 5 and 20 < writer.dropped < 40
    taken = read_until(pipe[0], b"lines were dropped")
    assert f"quire: {writer.dropped} lines were dropped".encode() in taken
    assert taken.count(b"x\n") == 40 - writer.dropped
    writer.write("again")
    assert b"again\n" in read_until(pipe[0], b"again\n")
    writer.close()


def test_the_end_does_not_wait_for_a_reader_that_stalls(pipe: tuple[int, int]) -> None:
    writer = LineWriter()
    writer.write("x" * 500_000)
    began_s = time.monotonic()
    writer.close(timeout_s=0.1)
    assert time.monotonic() - began_s < 5
    drain = threading.Thread(target=read_until, args=(pipe[0], b"\n"))
    drain.start()
    drain.join(10)


def test_logging_goes_through_it(pipe: tuple[int, int]) -> None:
    before, level = logging.root.handlers[:], logging.root.level
    try:
        writer = set_up_logging(ServeConfig(log_format="json"))
        for _ in range(40):
            logging.getLogger("quire.test").warning("y" * 65_536)
        assert writer.dropped > 20
        found = read_until(pipe[0], b"lines were dropped")
        assert b'"level":"warning","logger":"quire","message":"quire: ' in found
        writer.close()
    finally:
        logging.basicConfig(handlers=before, level=level, force=True)
