"""The connector of a decode engine: other engines compute its prompts, and it copies their blocks while they do.

A prompt goes to the prefill engine with the fewest open prompts. Its last block, which is not full, is computed here,
so the first token is sampled here too, with all parameters of the request. If a prefill engine fails, what has arrived
stays, and the rest of the prompt is computed here: a request never depends on another process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.core.connector import LoadNews, NoConnector
from quire.core.fetches import Fetch, FetchBook, FetchItem
from quire.core.prefix_cache import PrefixMatch
from quire.types import BlockMover, EngineRequest, PrefillNews, Request, SamplingParams, Totals, TransferOrder

_LEAST_BLOCKS = 4  # fewer missing blocks are computed here
_WAIT_S = 1e-3


class PrefillEngines(Protocol):
    """The prefill engines of a decode engine."""

    def submit(self, request: EngineRequest) -> int | None:
        """Send a prompt to one of the engines and return its number, or None if none is up."""
        ...

    def release(self, request_id: str) -> None:
        """Let the engine of a request forget it and the blocks that it keeps for it. Unknown ids are ignored."""
        ...

    def news(self) -> list[PrefillNews]:
        """Return what has become of requests since the last call."""
        ...

    def notes(self) -> list[str]:
        """Return a text about each process that is not up."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class _Open:
    """A prompt at a prefill engine: the fetch of its blocks, and those whose copies have not been ordered."""

    def __init__(self, fetch: Fetch, engine: int) -> None:
        self.fetch, self.engine, self.failed = fetch, engine, False
        self.due: dict[tuple[int, int], FetchItem] = {(i.key[0], i.place): i for i in fetch.items}


class RemotePrefill(NoConnector):
    """The scheduler half of the connector of a decode engine.

    Args:
        book: the fetches of waiting requests.
        mover: copies blocks of prefill engines.
        engines: the prefill engines.
        totals: the counters to which hits and moved bytes are added.
        block_bytes: bytes of a block.
    """

    def __init__(
        self, book: FetchBook, mover: BlockMover, engines: PrefillEngines, totals: Totals, block_bytes: int
    ) -> None:
        self._book, self._mover, self._engines = book, mover, engines
        self._totals, self._block_bytes = totals, block_bytes
        self._open: dict[str, _Open] = {}  # by id at the prefill engine
        self._asked: dict[str, str] = {}  # id of a request -> id at the prefill engine
        self._tried: set[str] = (
            set()
        )  # requests that have been sent once; what is missing then is computed here
        self._orders: list[TransferOrder] = []
        self._copies: dict[int, tuple[_Open, list[FetchItem]]] = {}  # by ticket
        self._tickets = 0
        self._news: list[LoadNews] = []

    def match(self, request: Request, match: PrefixMatch) -> str:
        if request.id in self._tried:
            return ""
        wanted = self._book.wanted(request, lambda group, name: True)
        if len({index for index, _ in wanted}) < _LEAST_BLOCKS:
            return ""
        if self._book.wait_for_others(request, [key for _, key in wanted]):
            return "prefill"
        if (fetch := self._book.begin(request, wanted)) is None:
            return ""
        self._tried.add(request.id)
        if not self._submit(request, fetch):
            # The fetch may have evicted what `match` found, so the request is matched again in the next step.
            self._give_up(_Open(fetch, -1))
        return "prefill"

    def _submit(self, request: Request, fetch: Fetch) -> bool:
        source, size = request.source, self._book.block_size
        self._tickets += 1
        name = f"{request.id}#{self._tickets}"
        length = size * (1 + max(item.place for item in fetch.items))
        prompt = EngineRequest(
            name,
            request.tokens[:length].tolist(),
            SamplingParams(max_tokens=1, temperature=0.0),
            priority=source.priority,
            cache_salt=source.cache_salt,
            client=source.client,
            weight=source.weight,
            exports=True,
        )
        if (engine := self._engines.submit(prompt)) is None:
            return False
        self._open[name], self._asked[request.id] = _Open(fetch, engine), name
        return True

    def _give_up(self, one: _Open) -> None:
        """Stop to wait for blocks that have not been shown."""
        due, one.due = one.due, {}
        for item in due.values():
            self._book.arrive(one.fetch, item, ok=False)

    def plan(self) -> None:
        if self._orders:
            orders, self._orders = self._orders, []
            self._mover.start(orders)

    def done(self) -> list[LoadNews]:
        for news in self._engines.news():
            if one := self._open.get(news.request_id):
                self._hear(one, news)
        for ticket, failed in self._mover.ended() if self._copies else ():
            one, items = self._copies.pop(ticket)
            for index, item in enumerate(items):
                self._book.arrive(one.fetch, item, index not in failed and not one.failed)
        self._close_complete()
        self.plan()
        news_of_requests, self._news = self._news, []
        return news_of_requests + [LoadNews(request_id) for request_id in self._book.arrived()]

    def _hear(self, one: _Open, news: PrefillNews) -> None:
        items, sources = [], []
        for group, first, blocks in news.exported:
            for place, block in enumerate(blocks, first):
                if item := one.due.pop((group, place), None):
                    items.append(item)
                    sources.append(block)
        if items:
            self._pull(one, items, sources)
        if news.failed:
            one.failed = True
            self._book.cache.withdraw(
                item.block for item in one.fetch.items if item.key not in one.fetch.missing
            )
        if news.ended:
            self._give_up(one)
            self._news.append(LoadNews(one.fetch.request.id, "transfer"))

    def _pull(self, one: _Open, items: Sequence[FetchItem], sources: list[int]) -> None:
        self._tickets += 1
        self._copies[self._tickets] = one, list(items)
        targets = [item.block for item in items]
        self._orders.append(TransferOrder(self._tickets, "pull", sources, targets, peer=one.engine))
        moved = self._totals.moved_bytes
        moved["pull"] = moved.get("pull", 0) + len(items) * self._block_bytes
        tokens = len({item.place for item in items}) * self._book.block_size
        for counts in (self._totals.fetched_tokens, one.fetch.request.timing.fetched_tokens):
            counts["prefill"] = counts.get("prefill", 0) + tokens

    def _close_complete(self) -> None:
        """Let prefill engines forget the prompts whose blocks have all arrived, or will not."""
        for name in [name for name, one in self._open.items() if not one.fetch.missing]:
            self._open.pop(name)
            self._engines.release(name)

    def start(self, request: Request) -> None:
        self._book.drop(request)

    def finish(self, request: Request) -> bool:
        self._tried.discard(request.id)
        if one := self._open.get(self._asked.pop(request.id, "")):
            self._book.drop(request)
            self._give_up(one)  # copies in flight still end
            self._close_complete()
        self._book.drop(request)
        return False

    def reclaim(self, last: Request | None = None) -> bool:
        return self._book.reclaim(last)

    def pinned(self) -> Iterable[list[int]]:
        return self._book.pinned()

    @property
    def busy(self) -> bool:
        return bool(self._open or self._copies or self._orders)

    @property
    def notes(self) -> list[str]:
        return self._engines.notes()

    def wait(self) -> None:
        self._mover.wait(_WAIT_S)

    def close(self) -> None:
        self._engines.close()
        self._mover.close()
