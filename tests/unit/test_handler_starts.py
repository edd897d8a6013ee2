"""Starts of request handlers: in order, all of them, and a few in each pass of the event loop."""

from __future__ import annotations

import asyncio

from quire.serve.http.handler_starts import HandlerStarts


def passes_of(arrivals: list[int]) -> list[list[int]]:
    """Return the numbers of the handlers that start in each pass if `arrivals[i]` of them arrive in pass i."""

    async def run() -> list[list[int]]:
        starts, passes, number = HandlerStarts(asyncio.get_running_loop()), [], 0
        for count in [*arrivals, *[0] * 100]:
            passes.append(started := [])
            for _ in range(count):
                starts.start(lambda number=number, started=passes: started[-1].append(number))
                number += 1
            del started
            await asyncio.sleep(0)
        return passes

    return asyncio.run(run())


def test_a_handler_that_arrives_alone_starts_at_once() -> None:
    assert passes_of([1, 0, 1, 1])[:4] == [[0], [], [1], [2]]


def test_a_burst_is_spread_over_passes_in_order() -> None:
    passes = passes_of([500, 3, 0, 40])
    assert [number for started in passes for number in started] == list(range(543))
    assert max(map(len, passes)) <= 16, (
        "what is left of one pass and the share of the next fall into one interval"
    )
    assert len([started for started in passes if started]) >= 543 // 16
