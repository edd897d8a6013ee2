"""Gathered writes: the chunks that a step produced for all streams are written to their sockets together.

One token of 64 streams is 64 writes to 64 sockets. With the work for the next stream between two writes, each write
wakes a client that has just gone to sleep again, which costs more than all other work for the token. Gathered until
every stream has its chunk and then made in a row, the writes cost a tenth of that.

    step's outputs -> every stream's `BodyWriter` -> its transport -> `WriteScheduler.flush`: one write per connection
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl


class WriteScheduler:
    """The list of transports with gathered writes, flushed once per pass of the event loop. One per loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[GatheringTransport] = []

    def add(self, transport: GatheringTransport) -> None:
        """Schedule a flush of `transport`."""
        if (
            not self._waiting
        ):  # runs after the callbacks that are ready now, such as the other streams of this step
            self._loop.call_soon(self.flush)
        self._waiting.append(transport)

    def flush(self) -> None:
        """Flush all scheduled transports."""
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class GatheringTransport(asyncio.Transport):
    """A transport that gathers writes until `WriteScheduler` flushes it. The wrapped transport does flow control."""

    def __init__(self, transport: asyncio.Transport, writes: WriteScheduler) -> None:
        super().__init__()
        self._transport, self._writes = transport, writes
        self._held: list[bytes] = []
        # Bound directly, to save a call.
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
    """A writer of chunked HTTP bodies after the response head, without a task or an ASGI message per chunk."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow

    def write(self, piece: bytes) -> None:
        """Write `piece` as one HTTP chunk without waiting. If `is_full` is true afterwards, wait with `drain`."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    @property
    def is_full(self) -> bool:
        """Return whether the client's buffers are full."""
        return self._flow.write_paused

    async def drain(self) -> None:
        """Wait until the client has read enough to continue, or has disconnected."""
        await self._flow.drain()
