"""Compile specs outside the step loop. The library sees a spec here only after the helper process has survived it.

A few threads wait for the helper process. The cache holds grammars and refusals up to a number
and a size, and evicts the least recently used.
The vocabulary is loaded when the first spec arrives.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.grammar.client_queue import ClientQueue
from quire.grammar.mask_threads import start_thread
from quire.types import GrammarSpec, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.grammar.checker_process import Verdict
    from quire.grammar.matching import Vocabulary

_THREADS = 4  # for one client; one more thread serves the others
_CACHED = 256
_CACHED_CHARS = 16 << 20  # of all specs: one may have 1 MiB


class GrammarSource(Protocol):
    """A source of the vocabulary and of verdicts on specs: the helper process (checker.py)."""

    def tokens(self) -> list[bytes]:
        """Return the bytes of each token id; empty for ids that no grammar may use."""
        ...

    def check(self, spec: GrammarSpec) -> Verdict:
        """Compile and try out a spec. Raise RequestError if it cannot be enforced."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


@dataclass(slots=True, frozen=True)
class CheckedGrammar:
    """A grammar that the helper process has compiled and tried out within its limits."""

    spec: GrammarSpec
    text: str  # in the library's language
    memory_bytes: int  # peak memory of the trial
    vocabulary: Vocabulary

    def matcher(self, max_lexer_states: int) -> LLMatcher:
        """Build a matcher that shares no state with others. Takes 1 to 80 ms, mostly with the GIL released.

        Args:
            max_lexer_states: limit on the matcher's lexer states (`matching.limits`).
        """
        # Imported here, so that the library is loaded only for structured output.
        from quire.grammar.matching import build_matcher

        return build_matcher(self.vocabulary, self.spec, self.text, max_lexer_states)


class Compiler:
    """A cache of compiled specs and the threads that fill it. All requests with the same spec share one future.

    Attributes:
        wakeup: an event that is set when a spec has been checked. Mask threads set it, too.
    """

    def __init__(self, source: GrammarSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Future[CheckedGrammar]] = OrderedDict()
        self._jobs: ClientQueue[tuple[GrammarSpec, Future[CheckedGrammar]]] = ClientQueue(_THREADS)
        self._threads: list[threading.Thread] = []
        self.wakeup = threading.Event()
        self._loading = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def submit(self, spec: GrammarSpec, client: str = "") -> Future[CheckedGrammar]:
        """Return the future of a compiled spec, which ends with a grammar or a QuireError. Never blocks.

        Args:
            spec: the spec.
            client: the API client that sent it. Clients are served in turn.
        """
        with self._lock:
            future = self._cache.get(spec)
            if future is None:
                future = self._cache[spec] = Future()
                self._start_threads()
                self._evict()
            # A spec may wait in the lines of several clients, because the turn of the second may come first.
            if not (future.done() or future.running()):
                self._jobs.put(client, (spec, future))
            self._cache.move_to_end(spec)
            return future

    @property
    def num_queued(self) -> int:
        """Return the number of waiting jobs. A spec that several clients wait for counts once for each."""
        return len(self._jobs)

    @property
    def started(self) -> bool:
        """Return True once a spec has been submitted, so that threads run."""
        return bool(self._threads)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until `wakeup` is set, and clear it."""
        self.wakeup.wait(timeout_s)
        self.wakeup.clear()

    def close(self) -> None:
        self._jobs.close()
        self._source.close()

    def _evict(self) -> None:
        chars = sum(len(spec.text) for spec in self._cache)
        while len(self._cache) > _CACHED or (chars > _CACHED_CHARS and len(self._cache) > 1):
            spec, _ = self._cache.popitem(last=False)
            chars -= len(spec.text)

    def _start_threads(self) -> None:
        if not self._threads:
            self._threads = [start_thread(self._work, f"quire-grammar-{i}") for i in range(_THREADS + 1)]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            client, (spec, future) = job
            if self._claim(future):
                self._fulfil(spec, future)
            self._jobs.done(client)

    def _claim(self, future: Future[CheckedGrammar]) -> bool:
        """Mark a future as running. Return False if another thread has taken the same spec already."""
        with self._lock:
            return not (future.done() or future.running()) and future.set_running_or_notify_cancel()

    def _fulfil(self, spec: GrammarSpec, future: Future[CheckedGrammar]) -> None:
        try:
            future.set_result(self._compile(spec))
        except RequestError as error:
            future.set_exception(error)
        except Exception as error:  # not the fault of the spec, so the next request tries again
            with self._lock:
                self._cache.pop(spec, None)
            future.set_exception(error)
        self.wakeup.set()

    def _compile(self, spec: GrammarSpec) -> CheckedGrammar:
        vocabulary = self._load_vocabulary()  # concurrently with the helper process
        verdict = self._source.check(spec)
        return CheckedGrammar(spec, verdict.text, verdict.memory_bytes, vocabulary)

    def _load_vocabulary(self) -> Vocabulary:
        from quire.grammar.matching import Vocabulary

        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._source.tokens())
            return self._vocabulary
