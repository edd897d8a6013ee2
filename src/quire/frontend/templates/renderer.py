"""Chat templates rendered in helper processes (template_process.py), which hostile ones cannot leave or outlast.

The processes start with the first rendering. A rendering within the limits costs a fraction of a
millisecond more than one in this process would.
"""

from __future__ import annotations

import json
import marshal
import signal
import sys
import threading
import time
from collections import OrderedDict
from typing import Any

from quire.frontend.templates.helper_process import Answer, HelperEnded, HelperPool, HelpersBusy
from quire.frontend.templates.traits import TemplateTraits
from quire.types import Overloaded, RequestError

MAX_SOURCE_CHARS = 1 << 18  # the longest published template has 17,000
_RENDER, _TRAITS = 0, 1
_TEXT = 0
_TIME_SIGNAL = getattr(signal, "SIGPROF", 0)  # ends a process that takes too long; 0: only the deadline does
_CPU_S = 1.0
_WALL_S = 5.0  # with the start of the process
_QUEUE_S = 5.0
_MAX_ANSWER_BYTES = 80 << 20
_SMALL_BYTES = 1 << 15  # of variables: a template that takes too long for these does so for all
_STRIKES = 2  # renderings beyond the limits after which a template is refused at once
_REFUSED_S = 60.0
_MAX_KEPT = 64  # templates whose traits or strikes are remembered


class TemplateRenderer:
    """Renders chat templates. Any thread may ask; `close` ends the processes.

    Args:
        processes: renderings that run at once.
        nice: by how much the processes yield to others.
    """

    def __init__(self, processes: int = 2, nice: int = 0) -> None:
        command = [sys.executable, "-m", "quire.frontend.templates.process", str(_CPU_S), str(nice)]
        self._pool = HelperPool(command, processes, _MAX_ANSWER_BYTES)
        self._lock = threading.Lock()  # guards the two below
        self._traits: OrderedDict[str, TemplateTraits] = OrderedDict()
        self._strikes: OrderedDict[str, list[float]] = OrderedDict()  # times, by template

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template.

        Args:
            source: the template.
            variables: JSON types alone.

        Raises:
            RequestError: for a template that is wrong, refuses the messages, or exceeds a limit.
            Overloaded: if no process is free in time.
        """
        return self._ask(_RENDER, source, variables)

    def traits(self, source: str) -> TemplateTraits:
        """Return what a template understands, found out once. Raises as `render` does."""
        with self._lock:
            found = self._traits.get(source)
        if found is None:
            found = TemplateTraits(**json.loads(self._ask(_TRAITS, source, {})))
            with self._lock:
                _keep(self._traits, source, found)
        return found

    def close(self) -> None:
        self._pool.close()

    def _ask(self, kind: int, source: str, variables: dict[str, Any]) -> str:
        if len(source) > MAX_SOURCE_CHARS:
            raise RequestError(
                f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}"
            )
        self._refuse_if_struck(source)
        question = marshal.dumps((source, variables))
        try:
            answer = self._pool.ask(kind, question, _WALL_S, _QUEUE_S)
        except HelpersBusy:
            raise Overloaded(
                f"chat templates: no process was free to render one within {_QUEUE_S:.0f} s"
            ) from None
        except HelperEnded as error:
            if len(question) - len(source) <= _SMALL_BYTES and _took_too_long(error):
                self._strike(source)
            raise RequestError(_obituary(error)) from None
        return _text_of(answer)

    def _refuse_if_struck(self, source: str) -> None:
        with self._lock:
            times = self._strikes.get(source, [])
        if len(times) >= _STRIKES and time.monotonic() - times[-1] < _REFUSED_S:
            raise RequestError(
                f"the chat template was stopped: it exceeded its limits {_STRIKES} times and is refused "
                f"for {_REFUSED_S:.0f} s"
            )

    def _strike(self, source: str) -> None:
        with self._lock:
            times = [*self._strikes.get(source, []), time.monotonic()]
            _keep(self._strikes, source, times[-_STRIKES:])


def _keep(kept: OrderedDict[str, Any], source: str, value: Any) -> None:
    kept[source] = value
    kept.move_to_end(source)
    if len(kept) > _MAX_KEPT:
        kept.popitem(last=False)


def _text_of(answer: Answer) -> str:
    text = answer.body.decode("utf-8", "surrogatepass")
    if answer.kind != _TEXT:
        raise RequestError(text)
    return text


def _took_too_long(error: HelperEnded) -> bool:
    """Whether the template is to blame: past the deadline alone, it may be the machine that was stopped."""
    return error.signal == _TIME_SIGNAL if _TIME_SIGNAL else error.overdue


def _obituary(error: HelperEnded) -> str:
    """Say what the end of a process means for the template that it rendered."""
    if error.overdue:
        return f"the chat template was stopped: it runs for more than {_WALL_S:g} s"
    if error.signal and error.signal == _TIME_SIGNAL:
        return f"the chat template was stopped: it takes more than {_CPU_S:g} s of processor time"
    return (
        "the chat template was stopped: it made its process end, as too deep nesting or too much memory does"
    )
