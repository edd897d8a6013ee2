"""Specs to checked grammars, off the step loop: no spec reaches the library here before the helper process survived it.

A few threads wait for the helper. The cache holds grammars and refusals alike, and drops the least recently used
first. The vocabulary is loaded when the first spec arrives.
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

_THREADS = 4  # of one client; one more serves the others meanwhile
_CACHED = 256


class GrammarSource(Protocol):
    """Where vocabulary and checked grammars come from: the helper process (checker.py)."""

    def tokens(self) -> list[bytes]: ...

    def check(self, spec: GrammarSpec) -> Verdict: ...

    def close(self) -> None: ...


@dataclass(slots=True, frozen=True)
class CheckedGrammar:
    """A grammar that the helper process has compiled and tried out within its limits."""

    spec: GrammarSpec
    text: str  # in the library's language
    memory_bytes: int  # peak of the trial
    vocabulary: Vocabulary

    def matcher(self, max_lexer_states: int) -> LLMatcher:
        """Build a matcher that shares nothing with any other. Takes 1 to 80 ms, mostly with the GIL released."""
        # Imported here: without structured output the library is not loaded.
        from quire.grammar.matching import build_matcher

        return build_matcher(self.vocabulary, self.spec, self.text, max_lexer_states)


class Compiler:
    """Checks each spec once. The result is a future that all requests with this spec share."""

    def __init__(self, source: GrammarSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Future[CheckedGrammar]] = OrderedDict()
        self._jobs: ClientQueue[tuple[GrammarSpec, Future[CheckedGrammar]]] = ClientQueue(_THREADS)
        self._threads: list[threading.Thread] = []
        self.wakeup = threading.Event()  # something has been checked, or another thread has set it
        self._loading = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def submit(self, spec: GrammarSpec, client: str = "") -> Future[CheckedGrammar]:
        """Return the future of a grammar or a QuireError. Never waits. Clients are served in turn."""
        with self._lock:
            found = self._cache.get(spec)
            if found is None:
                found = self._cache[spec] = Future()
                self._start_threads()
                self._evict()
            if not (
                found.done() or found.running()
            ):  # another client's turn may come before that of the first
                self._jobs.put(client, (spec, found))
            self._cache.move_to_end(spec)
            return found

    def wait(self, timeout_s: float) -> None:
        """Wait until there is news since the last call, for `timeout_s` at most."""
        self.wakeup.wait(timeout_s)
        self.wakeup.clear()

    def close(self) -> None:
        self._jobs.close()
        self._source.close()

    def _evict(self) -> None:
        while len(self._cache) > _CACHED:
            self._cache.popitem(last=False)

    def _start_threads(self) -> None:
        if not self._threads:
            self._threads = [start_thread(self._work, f"quire-grammar-{i}") for i in range(_THREADS + 1)]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            client, (spec, future) = job
            if self._begin(future):
                self._settle(spec, future)
            self._jobs.done(client)

    def _begin(self, future: Future[CheckedGrammar]) -> bool:
        """Return False for a spec that another request has put in as well, and that was taken before."""
        with self._lock:
            return not (future.done() or future.running()) and future.set_running_or_notify_cancel()

    def _settle(self, spec: GrammarSpec, future: Future[CheckedGrammar]) -> None:
        try:
            future.set_result(self._compile(spec))
        except RequestError as error:
            future.set_exception(error)
        except Exception as error:  # not the spec's fault: the next request tries again
            with self._lock:
                self._cache.pop(spec, None)
            future.set_exception(error)
        self.wakeup.set()

    def _compile(self, spec: GrammarSpec) -> CheckedGrammar:
        vocabulary = self._load_vocabulary()  # while the helper process makes its own
        verdict = self._source.check(spec)
        return CheckedGrammar(spec, verdict.text, verdict.memory_bytes, vocabulary)

    def _load_vocabulary(self) -> Vocabulary:
        from quire.grammar.matching import Vocabulary

        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._source.tokens())
            return self._vocabulary
