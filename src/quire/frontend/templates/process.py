"""The process in which chat templates run.

    python -m quire.frontend.templates.process CPU_SECONDS NICE

It answers one question at a time and keeps compiled templates. A template that exceeds its processor time ends the
process by a signal. One that exceeds its memory gets an error, after which the process exits. renderer.py is the other
side. Few modules are imported, so that the process starts fast.

Windows has no such kernel limits (`resource`, `setitimer`): there the deadline of helper_process.py is the only limit.

question: RENDER or TRAITS, marshal of (source, variables)      answer: TEXT or FAILURE, UTF-8
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO

from quire.files.peak_memory import peak_bytes
from quire.frontend.templates.helper_process import HEADER, LAST
from quire.frontend.templates.sandbox import TemplateFailure, compile_template, run_template
from quire.frontend.templates.traits import probe_traits

RENDER, TRAITS = 0, 1  # kinds of questions
TEXT, FAILURE = 0, 1  # kinds of answers
MEMORY_BYTES = 384 << 20  # address space for templates and their texts, beyond that of the loaded modules
_KEPT_BYTES = 192 << 20  # a process whose peak memory exceeds this exits to free it


def main(cpu_s: float, nice: int) -> None:
    """Answer questions from standard input until it closes.

    Args:
        cpu_s: processor time per question, in seconds.
        nice: increment of the niceness of this process.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)  # hides the traceback of a crash
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    limit_memory()
    if nice and hasattr(os, "nice"):
        os.nice(nice)
    last = False
    while not last and (question := _read(sys.stdin.buffer)) is not None:
        kind, text, last = _answer(*question, cpu_s)
        body = text.encode("utf-8", "surrogatepass")
        answers.write(HEADER.pack(len(body), kind | (LAST if last else 0)) + body)
        answers.flush()


def _read(questions: IO[bytes]) -> tuple[int, bytes] | None:
    header = questions.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size, kind = HEADER.unpack(header)
    return kind, questions.read(size)


def _answer(kind: int, body: bytes, cpu_s: float) -> tuple[int, str, bool]:
    """Return the kind of the answer, its text, and whether the process must end."""
    try:
        _limit_time(cpu_s)
        source, variables = marshal.loads(body)
        compile_template(source)
        if kind == TRAITS:
            text = json.dumps(asdict(probe_traits(partial(run_template, source))))
        else:
            text = run_template(source, variables)
        return TEXT, text, _is_large()
    except TemplateFailure as error:
        return FAILURE, str(error), _is_large()
    except (MemoryError, RecursionError):
        return FAILURE, f"the chat template takes more than {MEMORY_BYTES >> 20} MiB of memory", True
    finally:
        _limit_time(0)


def _limit_time(cpu_s: float) -> None:
    """Let SIGPROF end the process after `cpu_s` seconds of processor time; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def limit_memory() -> None:
    """Make allocations beyond `MEMORY_BYTES` fail, where the kernel limits address space."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, OSError, ValueError):
        return


def _is_large() -> bool:
    return (peak_bytes() or 0) > _KEPT_BYTES


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
