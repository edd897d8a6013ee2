"""Gathered writes reach each connection in order, complete, and before it closes."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from quire.serve.http.writes import BodyWriter, GatheringTransport, WriteScheduler


class Recorder(asyncio.Transport):
    """A transport that records its writes in a list shared by all connections."""

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
        writes = WriteScheduler(asyncio.get_running_loop())
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


def test_a_body_writer_writes_chunks_and_says_when_it_is_full() -> None:
    log: list[tuple[str, bytes]] = []

    async def run() -> None:
        transport = Recorder("a", log)
        flow = FlowControl(transport)
        body_writer = BodyWriter(transport, flow)
        body_writer.write(b"x" * 26)
        assert log == [("a", b"1a\r\n" + b"x" * 26 + b"\r\n")] and not body_writer.is_full
        flow.pause_writing()
        assert body_writer.is_full
        waiting = asyncio.ensure_future(body_writer.drain())
        await asyncio.sleep(0)
        assert not waiting.done()
        flow.resume_writing()
        await waiting
        assert not body_writer.is_full

    asyncio.run(run())
