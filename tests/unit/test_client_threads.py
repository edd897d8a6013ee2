"""Clients take turns in the tokenizer threads: a burst of one does not delay another, however slow its work is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire.serve.client_threads import ClientThreads
from quire.serve.http.auth import ANYONE, ApiClient
from quire.serve.http.errors import ApiError

ALPHA, BETA = ApiClient("alpha"), ApiClient("beta")


def play(
    scene: Callable[[ClientThreads], Coroutine[Any, Any, None]], threads: int = 2, most: int = 100
) -> None:
    pool = ClientThreads(threads, most)
    try:
        asyncio.run(asyncio.wait_for(scene(pool), 30))
    finally:
        pool.close()


def start(
    pool: ClientThreads, client: ApiClient, work: Callable[[], Any], count: int = 1
) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(pool.run(client, work)) for _ in range(count)]


def test_one_client_is_served_in_order_by_the_threads_there_are() -> None:
    async def scene(pool: ClientThreads) -> None:
        began: list[int] = []
        busy = most = 0
        lock = threading.Lock()

        def work(number: int) -> int:
            nonlocal busy, most
            with lock:
                began.append(number)
                busy += 1
                most = max(most, busy)
            time.sleep(0.002)
            with lock:
                busy -= 1
            return number

        assert await asyncio.gather(*(pool.run(ANYONE, work, i) for i in range(30))) == list(range(30))
        assert began == sorted(began) or all(abs(n - i) <= 1 for i, n in enumerate(began))
        assert most == 2

    play(scene)


def test_a_newcomer_begins_at_once_though_all_threads_are_taken() -> None:
    async def scene(pool: ClientThreads) -> None:
        release = threading.Event()
        held = start(pool, ALPHA, lambda: release.wait(20), 40)
        await asyncio.sleep(0.01)
        assert await pool.run(BETA, lambda: "here") == "here"
        assert not any(task.done() for task in held)
        release.set()
        await asyncio.gather(*held)

    play(scene)


def test_clients_take_turns_by_the_time_that_their_work_takes() -> None:
    async def scene(pool: ClientThreads) -> None:
        order: list[str] = []
        gate = threading.Event()
        clients = [
            ALPHA,
            *(ApiClient(f"other{i}") for i in range(4)),
        ]  # they occupy the thread and all spare ones
        held = [task for client in clients for task in start(pool, client, lambda: gate.wait(20))]
        await asyncio.sleep(0.01)

        def work(name: str, took_s: float) -> Callable[[], None]:
            return lambda: (time.sleep(took_s), order.append(name))[0]

        slow = start(pool, ALPHA, work("a", 0.02), 10)
        fast = start(pool, BETA, work("b", 0.001), 10)
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*held, *slow, *fast)
        assert order.index("b") <= 2 and "".join(order).rindex("b") < len(order) - 3, order

    play(scene, threads=1)


def test_weights_are_shares_of_time() -> None:
    async def scene(pool: ClientThreads) -> None:
        order: list[str] = []

        def work(name: str) -> Callable[[], None]:
            return lambda: (time.sleep(0.002), order.append(name))[0]

        tasks = [
            task
            for client in (ApiClient("heavy", weight=4.0), ApiClient("light"))
            for task in start(pool, client, work(client.name), 40)
        ]
        await asyncio.gather(*tasks)
        assert order[:40].count("heavy") > 24

    play(scene, threads=1)


def test_a_clients_line_is_bounded_and_that_of_others_is_not_affected() -> None:
    async def scene(pool: ClientThreads) -> None:
        gate = threading.Event()
        tasks = start(pool, ALPHA, lambda: gate.wait(20), 2 + 5)
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as caught:
            await pool.run(ALPHA, lambda: None)
        assert caught.value.status == 503
        assert await pool.run(BETA, lambda: 7) == 7
        gate.set()
        await asyncio.gather(*tasks)

    play(scene, most=5)


def test_work_that_is_given_up_or_fails() -> None:
    async def scene(pool: ClientThreads) -> None:
        gate, ran = threading.Event(), []
        (held,) = start(pool, ALPHA, lambda: gate.wait(20))
        (left,) = start(pool, ALPHA, lambda: ran.append(1))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        gate.set()
        await held
        with pytest.raises(ZeroDivisionError):
            await pool.run(ALPHA, lambda: 1 // 0)
        assert await pool.run(ALPHA, lambda: 3) == 3 and not ran
        assert pool.idle

    play(scene, threads=1)
