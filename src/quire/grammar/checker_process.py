"""The helper process that compiles each grammar first, because a hostile one can crash or hang the library.

It loads the vocabulary and forks for each spec. The child compiles the spec and tries it out within limits of processor
time, memory and stack that the kernel enforces, and answers with the grammar's text or the reason for refusing it. The
parent stays single-threaded, small and alive. It exits when its input closes.

stdin    frames of Check                  stdout    one frame of VocabularyTable, then frames of Verdict
"""

from __future__ import annotations

import os
import selectors
import signal
import struct
import sys
import threading
from collections import deque
from pathlib import Path

import msgspec

from quire.files.peak_memory import peak_bytes
from quire.types import GrammarSpec, QuireError, RequestError

if sys.platform != "win32":  # on Windows only the messages of this module are used
    import resource

MAX_CHILDREN = 8  # specs checked concurrently; the others wait
_CPU_S = 2.0
_WALL_S = 20.0  # for a child that waits for a processor, or hangs without using one
_MEMORY_BYTES = 512 << 20  # address space beyond that of the parent
_STACK_BYTES = 2 << 20  # less than the stack of any thread that uses the grammar afterwards


class VocabularyTable(msgspec.Struct):
    """The bytes of each token id, or the reason why the tokenizer cannot be read."""

    tokens: list[bytes]
    error: str | None = None


class Check(msgspec.Struct):
    """A spec to check. The `id` identifies its verdict."""

    id: int
    spec: GrammarSpec


class Verdict(msgspec.Struct):
    """The result of a check.

    `text` is the grammar in the library's language, unless `error` says why the spec is refused. `memory_bytes` is the
    memory that compiling it and writing a short text took, as far as the kernel measures it.
    """

    id: int
    text: str = ""
    memory_bytes: int = 0
    error: str | None = None


def frame(message: msgspec.Struct) -> bytes:
    """Return a message with its length in front, 4 bytes, little-endian."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


class Frames:
    """An incremental splitter of a byte stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """Append bytes of the stream. Return the bodies of the frames that are complete now."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= 4:
            end = 4 + struct.unpack_from("<I", self._buffer)[0]
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[4:end]))
            del self._buffer[:end]
        return bodies


def main(tokenizer: str, vocab_size: int) -> None:
    """Serve checks from standard input until it closes.

    Args:
        tokenizer: path of the tokenizer, or empty for a vocabulary of bytes. That one suffices to check everything but
            the time that masks take.
        vocab_size: number of token ids of the model.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C and closes this process
    from quire.grammar.matching import BYTES, Vocabulary

    try:
        tokens = token_table(Path(tokenizer), vocab_size) if tokenizer else BYTES
    except QuireError as error:
        _write(1, frame(VocabularyTable([], str(error))))
        return
    _write(1, frame(VocabularyTable(tokens)))
    CheckServer(Vocabulary(tokens)).run()


def token_table(path: Path, vocab_size: int) -> list[bytes]:
    """Return the bytes of each id below `vocab_size`; empty for special tokens, which no grammar may use."""
    from quire.frontend.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    return [b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(vocab_size)]


class CheckServer:
    """The loop of the parent. It owns the children and a pipe from each, which it reads until the child exits."""

    def __init__(self, vocabulary: object) -> None:
        self._vocabulary = vocabulary
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[Check] = deque()
        self._children: dict[
            int, tuple[int, Check, bytearray]
        ] = {}  # pid, check, received data; by pipe descriptor

    def run(self) -> None:
        """Run checks until standard input closes."""
        frames, decode = Frames(), msgspec.msgpack.Decoder(Check).decode
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, 1 << 16)
                if key.fd != 0:
                    self._collect(key.fd, data)
                elif data:
                    self._waiting += map(decode, frames.push(data))
                else:
                    return
            while self._waiting and len(self._children) < MAX_CHILDREN:
                self._start(self._waiting.popleft())

    def _start(self, check: Check) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(self._vocabulary, check, writer)
        os.close(writer)
        self._children[reader] = pid, check, bytearray()
        self._selector.register(reader, selectors.EVENT_READ)

    def _collect(self, reader: int, data: bytes) -> None:
        pid, check, received = self._children[reader]
        received += data
        if data:
            return
        self._selector.unregister(reader)
        os.close(reader)
        del self._children[reader]
        _, status = os.waitpid(pid, 0)
        complete = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        _write(1, bytes(received) if complete else frame(_failed_verdict(check, status)))


def _child(vocabulary: object, check: Check, writer: int) -> None:
    """Check one spec, write the verdict and exit. Never returns."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the messages of a crash
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_memory()
        # The default action of these signals ends the process at any point.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        signal.setitimer(signal.ITIMER_REAL, _WALL_S)
        threading.stack_size(_STACK_BYTES)
        verdicts: list[Verdict] = []
        thread = threading.Thread(target=lambda: verdicts.append(_verdict(vocabulary, check)))
        thread.start()
        thread.join()
        _write(writer, frame(verdicts[0]))
        status = 0
    finally:
        os._exit(status)


def _limit_memory() -> None:
    """Limit the child to `_MEMORY_BYTES` beyond the memory that it inherits, where the kernel can."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _verdict(vocabulary: object, check: Check) -> Verdict:
    from quire.grammar.matching import Vocabulary, build_matcher, grammar_text, try_out

    assert isinstance(vocabulary, Vocabulary)
    spec, before = check.spec, peak_bytes() or 0
    try:
        text = grammar_text(spec)
        try_out(build_matcher(vocabulary, spec, text), vocabulary, spec)
        return Verdict(check.id, text, (peak_bytes() or 0) - before)
    except RequestError as error:
        return Verdict(check.id, error=str(error))
    except (RecursionError, MemoryError):
        return Verdict(
            check.id, error=f"{spec.kind} cannot be enforced: it is nested too deeply or too large"
        )


def _failed_verdict(check: Check, status: int) -> Verdict:
    """Return the verdict on a spec whose child ended without one."""
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if killed_by in (signal.SIGPROF, signal.SIGALRM):
        reason = f"it takes more than {_CPU_S:.0f} s to compile"
    elif killed_by in (signal.SIGSEGV, signal.SIGBUS):
        reason = "it is nested, or refers to itself through others, too deeply"
    elif killed_by in (signal.SIGABRT, signal.SIGKILL):
        reason = f"it takes more than {_MEMORY_BYTES >> 20} MiB to compile"
    else:
        reason = "compiling it failed"
    return Verdict(check.id, error=f"{check.spec.kind} cannot be enforced: {reason}")


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
