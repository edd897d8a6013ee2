"""What a step brought to all streams is written at once, by transports that gather writes.

One token of 64 streams is 64 writes to 64 sockets. Made one by one, with the work for the next stream in
between, each wakes a client that has just gone to sleep again, which costs more than everything else that is
done for the token. Gathered until all streams have made their pieces, and then made in a row, they cost a tenth.

    step's outputs -> every stream's `BodyWriter` -> its transport -> `WriteScheduler.flush`: one write per connection
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl


class WriteScheduler:
    """Owns the list of transports that hold something back. One per event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[GatheringTransport] = []

    def add(self, transport: GatheringTransport) -> None:
        if not self._waiting:  # behind all that is ready now, which is what else this step has woken
            self._loop.call_soon(self.flush)
        self._waiting.append(transport)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class GatheringTransport(asyncio.Transport):
    """A transport whose writes are made by `WriteScheduler`, in order. Flow control is that of the one beneath."""

    def __init__(self, transport: asyncio.Transport, writes: WriteScheduler) -> None:
        super().__init__()
        self._transport, self._writes = transport, writes
        self._held: list[bytes] = []
        # Unchanged, without a layer in between.
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._held:
            self._writes.add(self)
        self._held.append(bytes(data))

    def flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._transport.abort()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.flush()
        self._transport.set_protocol(protocol)


class BodyWriter:
    """Where the pieces of a body go whose head is sent, in chunks of HTTP: without a task or a message for each."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow

    def write(self, piece: bytes) -> None:
        """Never waits; `is_full` says afterwards whether to wait before the next piece."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    async def drain(self) -> None:
        """Until the client has read some of it, or has gone."""
        await self._flow.drain()
