"""Ctrl-C, from the first moment to the last: the process ends with 130 and one line, whatever it was doing.

An exception that is thrown into an import can be swallowed by the library that is being loaded, so while
something is imported, and when all is done but the interpreter has not ended yet, the process ends at once:
there is nothing to clean up. Otherwise `Interrupted` is raised.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130  # the exit code that shells know
_MESSAGE = b"quire: interrupted\n"


class Interrupted(KeyboardInterrupt):
    """Not KeyboardInterrupt itself: CPython remembers one that left code made from text, as `dataclasses` makes
    it, and then ends `python -m` by the signal, also if the exception has been caught long ago."""


@contextlib.contextmanager
def interruptible(last: bool) -> Iterator[None]:
    """Answer SIGINT as above. Not where it is ignored (under nohup) or in other hands, as in a test's.

    `last`: the process ends behind this; otherwise all is as before.
    """
    own = threading.current_thread() is threading.main_thread()
    own = own and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if own and signal.getsignal(signal.SIGINT) is _interrupt:
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
