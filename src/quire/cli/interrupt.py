"""Handling of Ctrl-C: the process ends with exit code 130 and one line, whatever it is doing.

An exception raised inside an import can be swallowed by the library that is being imported. So during an import, and
after the command until the interpreter ends, the process exits at once; there is nothing to clean up. Otherwise
`Interrupted` is raised.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130  # the exit code that shells use for SIGINT
_MESSAGE = b"quire: interrupted\n"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a command.

    A subclass, because CPython remembers a plain KeyboardInterrupt that leaves code compiled from a string, as
    `dataclasses` does. It then ends `python -m` by the signal even if the exception was caught long ago.
    """


@contextlib.contextmanager
def interruptible(last: bool) -> Iterator[None]:
    """Handle SIGINT inside this context, unless it is ignored (under nohup) or has another handler (in a test).

    Args:
        last: the process ends after this context; otherwise the default handler is restored.
    """
    handles = threading.current_thread() is threading.main_thread()
    handles = handles and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if handles and signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, _end if last else signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end(number, frame)
        frame = frame.f_back
    raise Interrupted


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, _MESSAGE)
    os._exit(INTERRUPTED)
