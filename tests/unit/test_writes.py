"""Writes that are gathered reach each connection in order, whole, and before it closes."""

from __future__ import annotations

import asyncio

import pytest

from quire.serve.stream import Patience
from quire.serve.writes import GatheringTransport, Writes


class Recorder(asyncio.Transport):
    """Keeps what is written, in one list for all connections."""

    def __init__(self, name: str, log: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.name, self.log, self.closed = name, log, False

    def write(self, data) -> None:
        assert not self.closed
        self.log.append((self.name, data))

    def close(self) -> None:
        self.log.append((self.name, b"closed"))
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_one_write_per_connection_behind_all_that_is_ready() -> None:
    log: list[tuple[str, bytes]] = []

    async def run() -> None:
        writes = Writes(asyncio.get_running_loop())
        a, b, c = (GatheringTransport(Recorder(name, log), writes) for name in "abc")

        async def stream(transport: GatheringTransport, data: bytes) -> None:
            transport.write(data[:1])
            transport.write(bytearray(data[1:]))
            assert not log

        await asyncio.gather(stream(a, b"123"), stream(b, b"456"), stream(c, b"789"))
        await asyncio.sleep(0)
        assert log == [("a", b"123"), ("b", b"456"), ("c", b"789")]
        log.clear()
        a.write(b"x")
        a.close()
        b.write(b"y")
        b.abort()
        c.write(b"z")
        await asyncio.sleep(0)
        assert log == [("a", b"x"), ("a", b"closed"), ("c", b"z")], "what was aborted is not written"
        await asyncio.sleep(0)
        assert len(log) == 3

    asyncio.run(run())


def test_patience_ends_with_a_write_that_does_not_return() -> None:
    async def run(waits: list[float]) -> int:
        done = 0

        async def send(message) -> None:
            await asyncio.sleep(waits[done])

        with Patience(0.6) as patience:
            write = patience.over(send)
            for _ in waits:
                await asyncio.sleep(0.15)  # between two writes it may take as long as it likes
                await write(b"x")
                done += 1
        return done

    assert asyncio.run(run([0.0, 0.2, 0.0, 0.2, 0.0, 0.0])) == 6
    with pytest.raises(TimeoutError):
        asyncio.run(run([0.0, 0.2, 60.0]))


def test_patience_is_not_what_cancels() -> None:
    async def run() -> None:
        async def inner() -> None:
            with Patience(60):
                await asyncio.sleep(60)

        task = asyncio.ensure_future(inner())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
