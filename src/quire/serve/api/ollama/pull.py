"""Downloads of models into the Hugging Face cache, one at a time, each in a thread.

The thread counts bytes; the request that waits for it reads the counts. If the request ends early, the next byte that
arrives ends the thread. What has been downloaded stays in the cache, and the next pull continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from quire.frontend.location import fetch_model
from quire.serve.http.errors import overloaded
from quire.types import ModelError

_INTERVAL_S = 0.2  # between two reports of progress
_RETRY_S = 30
_HOSTS = ("hf.co/", "huggingface.co/")
_LATEST = "latest"


class HubName(NamedTuple):
    """A Hugging Face id and a branch, tag or commit; None is the main branch."""

    repo: str
    revision: str | None


def hub_name(name: str) -> HubName:
    """Split a name as Ollama's clients write it: `hf.co/owner/model:revision`. Host and revision may be left out."""
    for host in _HOSTS:
        name = name.removeprefix(host)
    repo, _, revision = name.partition(":")
    return HubName(repo, None if revision in ("", _LATEST) else revision)


class PullProgress(NamedTuple):
    """The bytes that a pull has downloaded, and those that it knows of."""

    completed: int
    total: int


class PullCancelled(Exception):
    """The exception that ends the thread of a pull whose client has left."""


class ModelPull:
    """The download of one model in a thread."""

    def __init__(self, name: HubName) -> None:
        """Start the download on the running event loop."""
        self._name = name
        self._bars: list[Any] = []  # one per thing that the library counts
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        # A daemon: neither the end of the server nor that of the interpreter waits for a download.
        threading.Thread(target=self._run, name="pull", daemon=True).start()

    @property
    def running(self) -> bool:
        """Return whether the thread has not reported its end."""
        return not self._done.done()

    def cancel(self) -> None:
        """End the download, unless it is complete."""
        self._cancelled = True

    async def progress(self) -> AsyncIterator[PullProgress]:
        """Yield the progress whenever it has changed, until the download is complete.

        Raises:
            ModelError: if the model cannot be fetched.
        """
        seen = PullProgress(0, 0)
        while not self._done.done():
            await asyncio.wait((self._done,), timeout=_INTERVAL_S)
            found = self._progress()
            if found != seen and found.total:
                seen = found
                yield found
        self._done.result()

    def _progress(self) -> PullProgress:
        # The library counts bytes received and bytes written apart, each with an estimate of the total.
        bars = [bar for bar in self._bars if bar.total]
        if not bars:
            return PullProgress(0, 0)
        total = min(int(bar.total) for bar in bars)
        return PullProgress(min(total, max(int(bar.n) for bar in bars)), total)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            fetch_model(*self._name, progress=_bar_class(self))
        except Exception as caught:
            error = caught if isinstance(caught, ModelError) else ModelError(f"the pull failed: {caught}")
        with contextlib.suppress(RuntimeError):  # the server has stopped
            self._loop.call_soon_threadsafe(self._finish, error)

    def _finish(self, error: Exception | None) -> None:
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
            self._done.exception()  # a client that has left does not read it

    def add_bar(self, bar: Any) -> None:
        """Count the bytes of one of the library's progress bars."""
        self._bars.append(bar)

    def check(self) -> None:
        """Raise PullCancelled after `cancel`."""
        if self._cancelled:
            raise PullCancelled


def _bar_class(pull: ModelPull) -> type[Any]:
    """Return a class of progress bars that draw nothing and report to `pull`."""
    from tqdm import tqdm  # comes with huggingface_hub, which is loaded only now

    class SilentBar(tqdm):  # type: ignore[type-arg, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            if options.get("unit") == "B":
                pull.add_bar(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            pull.check()

    return SilentBar


class ModelPulls:
    """The pulls of a server: at most one at a time."""

    def __init__(self) -> None:
        self._latest: ModelPull | None = None

    def start(self, name: HubName) -> ModelPull:
        """Start a pull. Raise ApiError 503 while another one runs."""
        if self._latest is not None and self._latest.running:
            raise overloaded("another model is being pulled; one pull runs at a time", _RETRY_S)
        self._latest = ModelPull(name)
        return self._latest
