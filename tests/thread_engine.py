"""Whole engines whose ranks are threads of one process, for tests of many settings.

Each thread runs what the process of a rank runs, with real messages and gloo between the ranks. Only the start of
processes is left out, which would cost seconds per engine.
"""

from __future__ import annotations

import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from quire import rank_process
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.frontend.client.channel import Channel
from quire.host import build_engine
from quire.ranks import messages
from quire.ranks.group import RankGroup
from quire.ranks.remote import ChannelReader, JoinedRank
from quire.ranks.timeline import PhaseSpans
from quire.types import EngineInfo


class RankThread:
    """A rank that runs in a thread, with the attributes of a `JoinedRank` and of its process."""

    host, pid, device, returncode = "this process", 0, "cpu", 1

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process, self.channel = self, Channel(ours)
        self._ours, self._error = ours, ""
        self._thread = threading.Thread(target=self._run, args=(Channel(theirs),), daemon=True)
        self._thread.start()

    def _run(self, channel: Channel) -> None:
        try:
            channel.poll(60.0)
            start = messages.decode_start(channel.receive())
            rank_process.run_rank(start, channel, ChannelReader(channel), PhaseSpans())
        except EOFError:  # killed
            pass
        except BaseException as error:
            traceback.print_exc(limit=-4)
            self._error = f"{type(error).__name__}: {error}"
            channel.send(messages.encode(messages.RankError(type(error).__name__, self._error)))
        finally:
            channel.close()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 1

    def kill(self) -> None:
        self._ours.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(20.0 if timeout is None else timeout)
        return 1

    def exit_text(self) -> str:
        return self._error or "its thread"


@contextmanager
def thread_engine(config: EngineConfig) -> Iterator[tuple[Engine, EngineInfo]]:
    """Build an engine all of whose ranks are threads, and close it at the end."""
    sys.setswitchinterval(5e-4)  # ranks wait for each other, so one must not hold the interpreter for long
    count = config.num_ranks
    if count == 1:
        engine, info = build_engine(config)
    else:
        joined = cast(Any, [RankThread() for _ in range(count - 1)])
        group = RankGroup(count, config.rank_timeout, cast(list[JoinedRank], joined))
        engine, info = build_engine(config, group=group)
    try:
        yield engine, info
    finally:
        engine.close()
