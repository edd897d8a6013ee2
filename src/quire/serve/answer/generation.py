"""The generation for one HTTP request: its output as it arrives, its end, and how to end it early.

New output calls or wakes the route that waits, which then takes everything since it last did. A slow client gets larger
pieces, and nothing is stored twice on its behalf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.frontend.output import RequestState
from quire.serve.http.errors import ApiError
from quire.serve.observe.account import RequestTrack
from quire.types import CompletionOutput


class ChoiceDelta(NamedTuple):
    """New output of one choice."""

    prompt_index: int
    output: CompletionOutput  # text and tokens since the last delta


class Generation:
    """The generation of the choices for the prompts of one HTTP request."""

    def __init__(
        self,
        states: Sequence[RequestState],
        tracks: Sequence[RequestTrack],
        interval: int,
        on_end: Callable[[Generation], None],
        forecast_s: float | None = None,
    ) -> None:
        """Create a generation on the running event loop.

        Args:
            states: the prompts.
            tracks: the accounts of all choices, in the order of their prompts.
            interval: new tokens of a choice for which the waiting route is woken, after the first one; 0: only at the end.
            on_end: called once, when everything is finished or an error ended it.
            forecast_s: the time to first token that was predicted when it was admitted; None for no prediction.
        """
        self.states, self.tracks, self.forecast_s = list(states), list(tracks), forecast_s
        self._choices = [(n, answer) for n, state in enumerate(self.states) for answer in state.answers]
        self.error: ApiError | None = None  # why it ended early; its answers are void then
        self._interval = interval
        self._unfinished = len(self.states)  # prompts
        self._on_end: Callable[[Generation], None] | None = on_end
        self._loop = asyncio.get_running_loop()
        self._has_new = False  # output since the last wait
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[], bool] | None = None  # called instead of waking the waiter
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or self._unfinished == 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(state.prompt_token_ids) for state in self.states)

    @property
    def warnings(self) -> list[str]:
        """Return what was ignored in the constraints on the answers."""
        return list(dict.fromkeys(text for state in self.states for text in state.warnings))

    @property
    def cached_tokens(self) -> int:
        return sum(state.num_cached_tokens for state in self.states)

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.token_ids) for state in self.states for answer in state.answers)

    async def wait(self, take: Callable[[], bool] | None = None) -> None:
        """Wait until there is new output, as `interval` has it, or everything is finished.

        Args:
            take: called with such output instead of ending the wait, as long as it returns True.

        Raises:
            ApiError: the error that ended the generation early.
        """
        if not self._has_new and not self.finished:
            self._take, self._waiter = take, self._loop.create_future()
            await self._waiter
        self._has_new = False
        if self.error is not None:
            raise self.error

    def take(self) -> list[ChoiceDelta]:
        """Return everything produced since the last call, ordered by prompt and choice.

        Concatenating the deltas of a choice gives its final text and tokens.
        """
        return [
            ChoiceDelta(n, delta) for n, answer in self._choices if (delta := answer.take_delta()) is not None
        ]

    def changed(self, state: RequestState) -> None:
        """Notify the waiting route of new output in one of the states."""
        if state.finished:
            self._unfinished -= 1
        if self.finished:
            self._end()
        elif self._interval and any(answer.has_news(self._interval) for answer in state.answers):
            self._notify()

    def _notify(self) -> None:
        """Let the waiting route take the new output, or wake it."""
        waiter = self._waiter
        if self._take is None or waiter is None or waiter.done():
            self._wake()
            return
        try:
            if not self._take():
                self._wake()
        except Exception as error:  # raised in the waiting route only: other streams go on
            waiter.set_exception(error)

    def _wake(self) -> None:
        self._has_new = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        """End the generation with an error, unless it has ended."""
        if self._on_end is not None:
            self.error = error
            self._end()

    def _end(self) -> None:
        self._wake()
        if self._deadline is not None:
            self._deadline.cancel()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    def give_up_at(self, arrival_s: float, timeout_s: float) -> None:
        """End the generation with status 504 unless it finishes within `timeout_s` of its arrival."""
        error = ApiError(504, f"the request took longer than its timeout of {timeout_s:g} s", code="timeout")
        left_s = max(0.0, arrival_s + timeout_s - time.monotonic())
        self._deadline = self._loop.call_later(left_s, self.fail, error)
