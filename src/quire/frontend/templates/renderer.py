"""Chat templates rendered in helper processes (process.py), which a hostile template can neither leave nor outlast.

The processes start with the first rendering. A rendering there costs a fraction of a millisecond more than in this
process.
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
_TIME_SIGNAL = getattr(signal, "SIGPROF", 0)  # ends a process after CPU_S; 0: there is only the deadline
CPU_S = 1.0  # processor time of one rendering
WALL_S = 5.0  # deadline, including the start of the process
_QUEUE_S = 5.0
_MAX_ANSWER_BYTES = 80 << 20
_SMALL_BYTES = 1 << 15  # a template that is too slow for variables of this size is too slow for any
_STRIKES = 2  # timeouts after which a template is refused without being rendered
_REFUSED_S = 60.0
_MAX_KEPT = 64  # templates whose traits or strikes are remembered


class TemplateRenderer:
    """A renderer of untrusted chat templates, with a pool of processes that `close` ends. Any thread may call it.

    Args:
        processes: largest number of concurrent renderings.
        nice: increment of the processes' niceness.
    """

    def __init__(self, processes: int = 2, nice: int = 0) -> None:
        command = [sys.executable, "-m", "quire.frontend.templates.process", str(CPU_S), str(nice)]
        self._pool = HelperPool(command, processes, _MAX_ANSWER_BYTES)
        self._lock = threading.Lock()  # guards the next two attributes
        self._traits: OrderedDict[str, TemplateTraits] = OrderedDict()
        self._strikes: OrderedDict[str, list[float]] = OrderedDict()  # times of timeouts, by template

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template.

        Args:
            source: the Jinja source.
            variables: the template's variables, of JSON types only.

        Raises:
            RequestError: if the template is invalid, refuses the messages, or exceeds a limit.
            Overloaded: if no process becomes free in time.
        """
        return self._ask(_RENDER, source, variables)

    def traits(self, source: str) -> TemplateTraits:
        """Return how a template reads messages. The result is cached; errors are those of `render`."""
        with self._lock:
            traits = self._traits.get(source)
        if traits is None:
            traits = TemplateTraits(**json.loads(self._ask(_TRAITS, source, {})))
            with self._lock:
                _keep(self._traits, source, traits)
        return traits

    def pids(self) -> list[int]:
        """Return the ids of the running processes."""
        return self._pool.pids()

    def close(self) -> None:
        """End the processes. Later renderings raise Overloaded."""
        self._pool.close()

    def _ask(self, kind: int, source: str, variables: dict[str, Any]) -> str:
        if len(source) > MAX_SOURCE_CHARS:
            raise _template_error(
                f"the chat template must have at most {MAX_SOURCE_CHARS} characters, got {len(source)}"
            )
        self._refuse_if_struck(source)
        question = marshal.dumps((source, variables))
        try:
            answer = self._pool.ask(kind, question, WALL_S, _QUEUE_S)
        except HelpersBusy:
            raise Overloaded(
                f"chat templates: no process became free within {_QUEUE_S:.0f} s; try again"
            ) from None
        except HelperEnded as error:
            if len(question) - len(source) <= _SMALL_BYTES and _took_too_long(error):
                self._strike(source)
            raise _template_error(_failure_text(error)) from None
        return _text_of(answer)

    def _refuse_if_struck(self, source: str) -> None:
        with self._lock:
            times = self._strikes.get(source, [])
        if len(times) >= _STRIKES and time.monotonic() - times[-1] < _REFUSED_S:
            raise _template_error(
                f"the chat template was stopped: it exceeded its time limit {_STRIKES} times and is refused for "
                f"{_REFUSED_S:.0f} s"
            )

    def _strike(self, source: str) -> None:
        with self._lock:
            times = [*self._strikes.get(source, []), time.monotonic()]
            _keep(self._strikes, source, times[-_STRIKES:])


def _template_error(message: str) -> RequestError:
    return RequestError(message, param="chat_template")


def _keep(kept: OrderedDict[str, Any], source: str, value: Any) -> None:
    kept[source] = value
    kept.move_to_end(source)
    if len(kept) > _MAX_KEPT:
        kept.popitem(last=False)


def _text_of(answer: Answer) -> str:
    text = answer.body.decode("utf-8", "surrogatepass")
    if answer.kind != _TEXT:
        raise _template_error(text)
    return text


def _took_too_long(error: HelperEnded) -> bool:
    """Return whether the template used up its processor time; a missed deadline can also be a suspended machine."""
    return error.signal == _TIME_SIGNAL if _TIME_SIGNAL else error.overdue


def _failure_text(error: HelperEnded) -> str:
    """Describe why the process that rendered a template ended."""
    if error.overdue:
        return f"the chat template was stopped: it runs for more than {WALL_S:g} s"
    if error.signal and error.signal == _TIME_SIGNAL:
        return f"the chat template was stopped: it takes more than {CPU_S:g} s of processor time"
    return "the chat template was stopped: its process crashed, as too deep nesting or too much memory causes"
