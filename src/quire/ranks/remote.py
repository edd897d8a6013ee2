"""Ranks of other hosts: they connect to the first rank, which sends them plans over TCP instead of shared memory.

first rank    listens at `rank_address`, waits for all others, numbers them host by host
other ranks   `quire rank HOST:PORT`, once per GPU: connect, then do what rank_process.py does
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.frontend.client.channel import Channel
from quire.frontend.client.remote import Hello, RemoteProcess, accept, listen, split_address
from quire.types import ConfigError

_JOIN_S = 600.0  # limit on the wait for all ranks: a pod may have to pull its image
_NAP_S = 20e-6  # of a writer that waits for room


class JoinedRank:
    """A rank that has connected: its process, its channel, and the device that it chose."""

    def __init__(self, process: RemoteProcess, channel: Channel, hello: Hello) -> None:
        self.process, self.channel = process, channel
        self.host, self.pid, self.device = hello.host, hello.pid, hello.device


def await_ranks(address: str, token: str | None, count: int, timeout_s: float = _JOIN_S) -> list[JoinedRank]:
    """Wait until `count` ranks have connected. Return them host by host, in the order of their devices.

    Args:
        address: HOST:PORT to listen at.
        token: what ranks must present.
        count: number of ranks.
        timeout_s: longest wait.

    Raises:
        ConfigError: if the address cannot be listened at, or too few ranks have connected in time.
    """
    host, port = split_address(address)
    try:
        server = listen(host, port)
    except OSError as error:
        raise ConfigError(f"rank_address {address} cannot be listened at: {error}") from None
    found: list[JoinedRank] = []
    end_s = time.monotonic() + timeout_s
    with server:
        while len(found) < count:
            joined = accept(server, token or "", end_s - time.monotonic())
            if joined is None:
                raise ConfigError(
                    f"{len(found)} of {count} other ranks have connected to {address} within {timeout_s:g} s; start "
                    f"the rest with `quire rank {address}`"
                )
            end, hello = joined
            found.append(JoinedRank(RemoteProcess(end, hello), Channel(end), hello))
    return sorted(found, key=lambda rank: (rank.host, rank.device, rank.pid))


class ChannelRing:
    """The writer's side of a ring (ring.py) over channels, one for each reader."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._unsent = [False] * len(channels)

    def send(self, body: bytes, check: Callable[[], None]) -> None:
        """Send a message to all readers, calling `check` while one has no room."""
        for index, channel in enumerate(self._channels):
            self._unsent[index] = not channel.send(body)
        for index, channel in enumerate(self._channels):
            while self._unsent[index]:
                check()
                time.sleep(_NAP_S)
                self._unsent[index] = not channel.flush()

    def lag(self, index: int) -> int:
        """Return 1 if a reader has left a message unread so long that it did not fit, else 0."""
        return int(self._unsent[index])

    def close(self) -> None:
        pass


class ChannelReader:
    """The reader's side of a ring over a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def receive(self) -> bytes:
        """Wait for the next message. Raises EOFError if the first rank is gone."""
        while not self._channel.poll(1.0):
            pass
        return self._channel.receive()
