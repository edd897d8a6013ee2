"""The helper process seen from outside: ask it about a spec, get the grammar's text or a RequestError.

Any thread may ask; answers come in any order. The process starts with the first question, and again if it
should die. An API process may have a checker of its own, without a tokenizer: it tells whether a spec can
be enforced before anything is sent to the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from quire.grammar.checker_process import Check, Frames, Verdict, VocabularyTable, frame
from quire.types import GrammarSpec, Overloaded, RequestError

T = TypeVar("T")
_ANSWER_S = 60.0  # with the queue before it; the process itself ends a check after some seconds
_START_S = 120.0  # to read a tokenizer


class Checker:
    """`tokenizer` is a model's folder or file; None checks without a vocabulary, which starts at once."""

    def __init__(self, tokenizer: Path | None = None, vocab_size: int = 0) -> None:
        self._command = [
            sys.executable, "-m", "quire.grammar.checker_process", str(tokenizer or ""), str(vocab_size),
        ]  # fmt: skip
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def check(self, spec: GrammarSpec) -> Verdict:
        """The spec in the library's language, after it was compiled and tried out there. Waits.
        Raises RequestError for a spec that cannot be enforced, Overloaded when nobody could tell."""
        process = self._running()
        process.wait_for_table()
        verdict = process.ask(Check(next(self._ids), spec))
        if verdict.error is not None:
            raise RequestError(verdict.error)
        return verdict

    def tokens(self) -> list[bytes]:
        """What each token id adds to a text; empty for those that no grammar may use. Waits.
        Raises RequestError if there is no such tokenizer."""
        return self._running().wait_for_table()

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()
            self._process = None

    def _running(self) -> _Process:
        with self._lock:
            if self._process is None or self._process.dead:
                self._process = _Process(self._command)
            return self._process


class _Process:
    """One life of the helper process, with a thread that hands out what it says."""

    def __init__(self, command: list[str]) -> None:
        # In a group of its own, so that Ctrl-C reaches it through us alone.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin: IO[bytes] = self._popen.stdin
        self._stdout: IO[bytes] = self._popen.stdout
        self.dead = False
        self._lock = threading.Lock()  # of `dead` and `_asked`; never held while something waits
        self._writing = threading.Lock()
        self._table: Future[VocabularyTable] = Future()
        self._asked: dict[int, Future[Verdict]] = {}
        threading.Thread(target=self._listen, name="quire-grammar-answers", daemon=True).start()

    def wait_for_table(self) -> list[bytes]:
        table = _result(self._table, _START_S)
        if table.error is not None:
            raise RequestError(f"structured_outputs need the model's tokenizer: {table.error}")
        return table.tokens

    def ask(self, check: Check) -> Verdict:
        future: Future[Verdict] = Future()
        with self._lock:
            if self.dead:
                raise Overloaded(_GONE)
            self._asked[check.id] = future
        try:
            with self._writing:  # may wait until the process has got rid of its answers
                self._stdin.write(frame(check))
                self._stdin.flush()
        except (OSError, ValueError):  # ValueError: it was closed meanwhile
            raise Overloaded(_GONE) from None
        return _result(future, _ANSWER_S)

    def close(self) -> None:
        with self._lock:
            self.dead = True
        self._popen.terminate()  # first, so that nobody goes on waiting for it to read
        with self._writing, contextlib.suppress(OSError):
            self._stdin.close()
        self._popen.wait()

    def _listen(self) -> None:
        frames, told = Frames(), False
        while data := os.read(self._stdout.fileno(), 1 << 20):
            for body in frames.push(data):
                if not told:
                    told = True
                    self._table.set_result(msgspec.msgpack.decode(body, type=VocabularyTable))
                    continue
                verdict = msgspec.msgpack.decode(body, type=Verdict)
                with self._lock:
                    future = self._asked.pop(verdict.id, None)
                if future is not None:
                    future.set_result(verdict)
        with self._lock:
            self.dead = True
            left = list(self._asked.values())
        for waiting in left:
            waiting.set_exception(Overloaded(_GONE))
        if not told:
            self._table.set_exception(Overloaded(_GONE))


_GONE = "structured_outputs: the process that compiles grammars ended unexpectedly; try again"


def _result(future: Future[T], timeout_s: float) -> T:
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        raise Overloaded(
            f"structured_outputs: no answer from the compiler of grammars within {timeout_s:.0f} s; try again"
        ) from None
