"""Specs to matchers, off the step loop: cached, shared, and never before the helper process has survived them.

A few threads wait for the helper and then compile with the GIL released. Owns the cache, of matchers and of
refusals alike, bounded in number and memory, least recently used out first. The vocabulary is loaded when
the first spec arrives.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from quire.grammar.client_queue import ClientQueue
from quire.types import GrammarSpec, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.grammar.checker_process import Verdict
    from quire.grammar.matching import Vocabulary

_THREADS = 4  # of one client; one more serves the others meanwhile
_STACK_BYTES = 64 << 20  # reserved, not used: what passed the helper with 2 MB needs no more here
_CACHED = 256
_CACHED_BYTES = 512 << 20


class Source(Protocol):
    """Where vocabulary and checked grammars come from: the helper process (checker.py)."""

    def tokens(self) -> list[bytes]: ...

    def check(self, spec: GrammarSpec) -> Verdict: ...

    def close(self) -> None: ...


class Compiler:
    """Matchers come as futures, shared by all requests with the same spec: each takes a copy."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Future[LLMatcher]] = OrderedDict()
        self._bytes: dict[GrammarSpec, int] = {}  # of those that are compiled
        self._jobs: ClientQueue[tuple[GrammarSpec, Future[LLMatcher]]] = ClientQueue(_THREADS)
        self._threads: list[threading.Thread] = []
        self._news = threading.Event()
        self._loading = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def submit(self, spec: GrammarSpec, client: str = "") -> Future[LLMatcher]:
        """A matcher at the beginning of a text, or a QuireError, sooner or later. Never waits."""
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
        """Until something has been compiled since the last call, or for `timeout_s`."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        self._jobs.close()
        self._source.close()

    def _evict(self) -> None:
        """Requests that use what goes keep it alive."""
        while len(self._cache) > _CACHED or (
            len(self._cache) > 1 and sum(self._bytes.values()) > _CACHED_BYTES
        ):
            spec, _ = self._cache.popitem(last=False)
            self._bytes.pop(spec, None)

    def _start_threads(self) -> None:
        if self._threads:
            return
        before = threading.stack_size(_STACK_BYTES)
        try:
            for i in range(_THREADS + 1):
                thread = threading.Thread(target=self._work, name=f"quire-grammar-{i}", daemon=True)
                self._threads.append(thread)
                thread.start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            client, (spec, future) = job
            if self._begin(future):
                self._settle(spec, future)
            self._jobs.done(client)

    def _begin(self, future: Future[LLMatcher]) -> bool:
        """Return False for a spec that another request has put in as well, and that was taken before."""
        with self._lock:
            return not (future.done() or future.running()) and future.set_running_or_notify_cancel()

    def _settle(self, spec: GrammarSpec, future: Future[LLMatcher]) -> None:
        try:
            future.set_result(self._compile(spec))
        except RequestError as error:
            future.set_exception(error)
        except Exception as error:  # not the spec's fault: the next request tries again
            with self._lock:
                self._cache.pop(spec, None)
            future.set_exception(error)
        self._news.set()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        # Imported here: without structured output the library is not loaded.
        from quire.grammar.matching import compiled

        vocabulary = self._load_vocabulary()  # while the helper process makes its own
        verdict = self._source.check(spec)
        matcher = compiled(vocabulary, spec, verdict.text)
        with self._lock:
            if spec in self._cache:
                self._bytes[spec] = verdict.memory_bytes
                self._evict()
        return matcher

    def _load_vocabulary(self) -> Vocabulary:
        from quire.grammar.matching import Vocabulary

        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._source.tokens())
            return self._vocabulary
