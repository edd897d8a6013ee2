"""A line on the terminal while a model loads: its name, the size of its files and the seconds so far."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.frontend.location import BUILT_IN, locate_model

if TYPE_CHECKING:
    from quire.llm import LLM

_INTERVAL_S = 0.1
_CLEAR = "\r\x1b[K"


def open_model(settings: dict[str, Any]) -> LLM:
    """Return a loaded `LLM`, downloading the model first if necessary. Both show their progress on a terminal.

    Args:
        settings: fields of `EngineConfig`.
    """
    with loading(settings.get("model", "demo"), settings.get("revision")):
        from quire.llm import LLM

        return LLM(**settings)


@contextmanager
def loading(name: str, revision: str | None = None) -> Iterator[None]:
    """Show inside this context, on a terminal, that the model `name` is loading.

    The model is located first, because a download shows its own progress bars.
    """
    if not sys.stderr.isatty():
        yield
        return
    path = locate_model(name, revision).path
    with _line(f"Loading {name} ({size_text(weight_bytes(path))})"):
        yield


@contextmanager
def loading_elsewhere(name: str) -> Iterator[None]:
    """Show the same while another process loads the model, unless that process downloads it and shows its own bars."""
    here = name in BUILT_IN or os.path.exists(name)
    if not (here and sys.stderr.isatty()):
        yield
        return
    with loading(name):
        yield


@contextmanager
def _line(text: str) -> Iterator[None]:
    """Keep a line with `text` and the seconds so far inside this context."""
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(text, done))
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(text: str, done: threading.Event) -> None:
    """Write the line again and again until `done` is set, and then clear it."""
    begin = time.monotonic()
    while not done.wait(_INTERVAL_S):
        sys.stderr.write(f"{_CLEAR}{text} ... {time.monotonic() - begin:.1f} s")
        sys.stderr.flush()
    sys.stderr.write(_CLEAR)
    sys.stderr.flush()


def weight_bytes(path: Path) -> int:
    """Return the size of a model's weight files: a .gguf file, or those of a folder."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def size_text(count: float) -> str:
    """Return a number of bytes in decimal units, as file managers and Hugging Face show it."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
