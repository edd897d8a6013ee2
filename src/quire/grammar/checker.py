"""The client of the helper process that checks specs (checker_process.py).

Any thread may ask, and answers arrive in any order. The process starts with the first question and again if it dies. An
API process may have a checker without a tokenizer, to refuse a spec before it is sent to the engine.
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
_ANSWER_S = (
    60.0  # for one check, including its wait in the queue; the process ends each check after some seconds
)
_START_S = 120.0  # for reading a tokenizer


class Checker:
    """A checker of specs, which owns a helper process.

    Args:
        tokenizer: a model's folder or file. None checks against a vocabulary of bytes, which needs no loading.
        vocab_size: number of token ids of the model.
    """

    def __init__(self, tokenizer: Path | None = None, vocab_size: int = 0) -> None:
        self._command = [
            sys.executable, "-m", "quire.grammar.checker_process", str(tokenizer or ""), str(vocab_size),
        ]  # fmt: skip
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._process: CheckerProcess | None = None

    @property
    def process(self) -> CheckerProcess | None:
        """Return the helper process, or None if it has not been started."""
        return self._process

    def check(self, spec: GrammarSpec) -> Verdict:
        """Compile and try out a spec in the helper process, and wait for the verdict.

        Returns:
            The grammar's text in the library's language, and its memory.

        Raises:
            RequestError: if the spec cannot be enforced.
            Overloaded: if the process died or did not answer in time.
        """
        process = self._running()
        process.wait_for_table()
        verdict = process.ask(Check(next(self._ids), spec))
        if verdict.error is not None:
            raise RequestError(verdict.error, param="structured_outputs")
        return verdict

    def tokens(self) -> list[bytes]:
        """Return the bytes of each token id, waiting until the process has read the tokenizer.

        Ids that no grammar may use have no bytes.

        Raises:
            RequestError: if the tokenizer cannot be read.
            Overloaded: if the process died or did not answer in time.
        """
        return self._running().wait_for_table()

    def close(self) -> None:
        """End the process. A later question starts it again."""
        with self._lock:
            if self._process is not None:
                self._process.close()
            self._process = None

    def _running(self) -> CheckerProcess:
        with self._lock:
            if self._process is None or self._process.dead:
                self._process = CheckerProcess(self._command)
            return self._process


class CheckerProcess:
    """One run of the helper process, with a thread that distributes its answers."""

    def __init__(self, command: list[str]) -> None:
        # A new session, so that Ctrl-C reaches only this process, which then closes the helper.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin: IO[bytes] = self._popen.stdin
        self._stdout: IO[bytes] = self._popen.stdout
        self.dead = False
        self._lock = threading.Lock()  # guards `dead` and `_pending`; never held while waiting
        self._writing = threading.Lock()
        self._table: Future[VocabularyTable] = Future()
        self._pending: dict[int, Future[Verdict]] = {}  # unanswered checks, by id
        threading.Thread(target=self._listen, name="quire-grammar-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def num_pending(self) -> int:
        """Return the number of unanswered checks."""
        return len(self._pending)

    def wait_for_table(self) -> list[bytes]:
        """Return the bytes of each token id, waiting until the process has read the tokenizer."""
        table = _result(self._table, _START_S)
        if table.error is not None:
            raise RequestError(
                f"structured_outputs need the model's tokenizer: {table.error}", param="structured_outputs"
            )
        return table.tokens

    def ask(self, check: Check) -> Verdict:
        """Send a check and wait for its verdict. Raise Overloaded if the process is dead or does not answer."""
        future: Future[Verdict] = Future()
        with self._lock:
            if self.dead:
                raise Overloaded(_GONE)
            self._pending[check.id] = future
        try:
            with self._writing:  # writing blocks while the process waits for its answers to be read
                self._stdin.write(frame(check))
                self._stdin.flush()
        except (OSError, ValueError):  # ValueError: the pipe was closed meanwhile
            raise Overloaded(_GONE) from None
        return _result(future, _ANSWER_S)

    def close(self) -> None:
        """End the process. Unanswered checks raise Overloaded."""
        with self._lock:
            self.dead = True
        self._popen.terminate()  # first, so that no thread keeps waiting for it to read
        with self._writing, contextlib.suppress(OSError):
            self._stdin.close()
        self._popen.wait()

    def _listen(self) -> None:
        frames, has_table = Frames(), False
        while data := os.read(self._stdout.fileno(), 1 << 20):
            for body in frames.push(data):
                if not has_table:
                    has_table = True
                    self._table.set_result(msgspec.msgpack.decode(body, type=VocabularyTable))
                    continue
                verdict = msgspec.msgpack.decode(body, type=Verdict)
                with self._lock:
                    future = self._pending.pop(verdict.id, None)
                if future is not None:
                    future.set_result(verdict)
        with self._lock:
            self.dead = True
            unanswered = list(self._pending.values())
        for future in unanswered:
            future.set_exception(Overloaded(_GONE))
        if not has_table:
            self._table.set_exception(Overloaded(_GONE))


_GONE = "structured_outputs: the process that compiles grammars ended unexpectedly; try again"


def _result(future: Future[T], timeout_s: float) -> T:
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        raise Overloaded(
            f"structured_outputs: the process that compiles grammars did not answer within {timeout_s:.0f} s; try again"
        ) from None
