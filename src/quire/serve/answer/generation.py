"""One HTTP request's prompts on their way through the engine: what is new, how it ended, how to end it.

When something is new, whoever waits is called or woken, and takes all that came since it last did: a client that
reads slowly gets larger pieces, and nothing is kept twice on its behalf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from quire.frontend.output import RequestState
from quire.serve.http.errors import ApiError
from quire.serve.observe.account import RequestTrack
from quire.types import CompletionOutput

Delta: TypeAlias = tuple[
    int, CompletionOutput
]  # the number of a prompt, and what is new of one of its answers


class Generation:
    def __init__(
        self,
        states: Sequence[RequestState],
        tracks: Sequence[RequestTrack],
        live: bool,
        over: Callable[[Generation], None],
    ) -> None:
        """`tracks` are those of all their answers, in order. `live`: wake for every token, not only for the end.
        `over` is called once, when all is finished or an error ended it."""
        self.states, self.tracks = list(states), list(tracks)
        self._answers = [(n, answer) for n, state in enumerate(self.states) for answer in state.answers]
        self.error: ApiError | None = None  # why it ended early; its answers are worth nothing then
        self._live = live
        self._left = len(self.states)  # prompts whose answers are not finished
        self._over: Callable[[Generation], None] | None = over
        self._loop = asyncio.get_running_loop()
        self._new = False  # since somebody waited
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[], bool] | None = None  # what `_waiter` wants to have called
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or self._left == 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(state.prompt_token_ids) for state in self.states)

    @property
    def cached_tokens(self) -> int:
        return sum(state.num_cached_tokens for state in self.states)

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.token_ids) for state in self.states for answer in state.answers)

    async def wait(self, take: Callable[[], bool] | None = None) -> None:
        """Until something is new (`live`) or all is finished. Raises the ApiError that ended it early.

        `take` is called instead whenever something is new, as long as it says that it can take more.
        """
        if not self._new and not self.finished:
            self._take, self._waiter = take, self._loop.create_future()
            await self._waiter
        self._new = False
        if self.error is not None:
            raise self.error

    def take(self) -> list[Delta]:
        """What is new, in the order of prompts and of their answers. All deltas of an answer put together are its
        final text and tokens."""
        return [(n, delta) for n, answer in self._answers if (delta := answer.take_delta()) is not None]

    def changed(self, state: RequestState) -> None:
        """Something is new in one of its states."""
        if state.finished:
            self._left -= 1
        if self.finished:
            self._end()
        elif self._live:
            self._tell()

    def _tell(self) -> None:
        """Have whoever waits take what is new."""
        waiter = self._waiter
        if self._take is None or waiter is None or waiter.done():
            self._wake()
            return
        try:
            if not self._take():
                self._wake()
        except Exception as error:  # it is the waiter's, and must not reach other streams
            waiter.set_exception(error)

    def _wake(self) -> None:
        self._new = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        """End it with an error, unless it is over."""
        if self._over is not None:
            self.error = error
            self._end()

    def _end(self) -> None:
        self._wake()
        if self._deadline is not None:
            self._deadline.cancel()
        over, self._over = self._over, None
        if over is not None:
            over(self)

    def give_up_at(self, arrival_s: float, timeout_s: float) -> None:
        """End it with 504 unless it is finished `timeout_s` after it arrived."""
        error = ApiError(504, f"the request took longer than its timeout of {timeout_s:g} s", code="timeout")
        left_s = max(0.0, arrival_s + timeout_s - time.monotonic())
        self._deadline = self._loop.call_later(left_s, self.fail, error)
