"""The processes of the ranks other than the first, as the host sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from quire import types
from quire.compilers import usual_count
from quire.config import EngineConfig
from quire.frontend.client.channel import Channel
from quire.frontend.client.remote import RemoteProcess, meeting_host
from quire.ranks.messages import CopiesEnded, PhaseEnded, RankError, StartRank, decode_from_rank, encode
from quire.ranks.remote import ChannelRing, JoinedRank, await_ranks
from quire.ranks.ring import ReaderEnd, RingWriter
from quire.ranks.timeline import Spans
from quire.types import BlockMover, ConfigError, EngineDead, Executor, QuireError

_POLL_S = 0.05  # interval at which a waiting host checks that the processes live
_STOP_S = 5.0  # time for an orderly exit, after which a process is killed
_BLOCKED_S = 10.0  # time for the host to notice that a rank has ended, after which this process ends
_CAUSE_S = 2.0  # time for the cause of a failure to arrive after its consequence


class Peers(Protocol):
    """The ranks other than the first."""

    def start(self, config: EngineConfig, path: Path) -> None:
        """Tell each rank what to build. `collect` waits until all have imported torch."""
        ...

    def open_meeting(self) -> int:
        """Return the port of the loopback interface at which the ranks meet."""
        ...

    def send(self, body: bytes) -> None:
        """Send a message to all of them."""
        ...

    def collect(self) -> list[int]:
        """Wait until every one has ended the current phase of the start-up, and return their results.

        Raises:
            QuireError: the error of a rank.
        """
        ...

    def spans(self) -> list[Spans]:
        """Return when each of them ran the phases of its start-up, in the order of ranks."""
        ...

    def executor(self, local: Executor) -> Executor:
        """Return the executor over `local`, which is that of the first rank, and these ranks."""
        ...

    def mover(self, local: BlockMover) -> BlockMover:
        """Return the mover over `local`, which is that of the first rank, and these ranks."""
        ...

    def give_up(self, consequence: BaseException | str) -> BaseException:
        """End all ranks after an error of the first one, and return the error to raise.

        Args:
            consequence: what happened there. If another rank turns out to have failed, that is the cause.
        """
        ...

    def kill(self) -> None:
        """Kill all processes."""
        ...

    def watched(self) -> AbstractContextManager[object]:
        """Return a context for work of the first rank that may wait for the others on a GPU, where nothing fails.

        If a rank ends and the work does not, this process ends.
        """
        ...


class NoPeers:
    """The peers of a single rank."""

    def start(self, config: EngineConfig, path: Path) -> None:
        pass

    def open_meeting(self) -> int:
        return 0

    def send(self, body: bytes) -> None:
        pass

    def collect(self) -> list[int]:
        return []

    def spans(self) -> list[Spans]:
        return []

    def executor(self, local: Executor) -> Executor:
        return local

    def mover(self, local: BlockMover) -> BlockMover:
        return local

    def give_up(self, consequence: BaseException | str) -> BaseException:
        return consequence if isinstance(consequence, BaseException) else EngineDead(consequence)

    def kill(self) -> None:
        pass

    def watched(self) -> AbstractContextManager[object]:
        return nullcontext()


def start_peers(config: EngineConfig) -> Peers:
    """Start the processes of all ranks but the first.

    Raises:
        ConfigError: on Windows, where a child process cannot inherit descriptors.
    """
    if config.num_ranks == 1:
        return NoPeers()
    size = config.num_ranks
    joined = await_ranks(config.rank_address, config.rank_token, size - 1) if config.rank_address else None
    return RankGroup(size, config.rank_timeout, joined, config.device, compiler_count(config))


def compiler_count(config: EngineConfig) -> int:
    """Return the number of processes that compile kernels for each rank of this host."""
    if config.compile_processes is not None:
        return config.compile_processes
    return usual_count(1 if config.rank_address else config.num_ranks)


class _LocalProcess(subprocess.Popen[bytes]):
    """A process of this host."""

    def exit_text(self) -> str:
        """Return how it ended."""
        return _exit_text(self.returncode)


@dataclass(frozen=True, slots=True)
class _Peer:
    """One process, and what it is called in messages to users."""

    process: _LocalProcess | RemoteProcess
    channel: Channel
    name: str
    device: str | None = None  # None: that of the settings
    results: deque[int] = field(default_factory=deque)  # of phases that have ended
    spans: Spans = field(default_factory=dict)
    copies: deque[CopiesEnded] = field(default_factory=deque)  # ends of transfers
    errors: list[RankError] = field(default_factory=list)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in the messages that have arrived, waiting up to `timeout_s` for the first one."""
        with contextlib.suppress(EOFError):  # the process is ending, and its messages have been read
            while self.channel.poll(timeout_s):
                timeout_s = 0.0
                message = decode_from_rank(self.channel.receive())
                if isinstance(message, PhaseEnded):
                    self.results.append(message.result)
                    self.spans.update(message.spans)
                elif isinstance(message, CopiesEnded):
                    self.copies.append(message)
                else:
                    self.errors.append(message)


class RankGroup:
    """The processes of ranks 1 to size - 1, the ring of messages to them, and their channels.

    Args:
        size: number of ranks, the host's included.
        timeout_s: time without progress after which a rank counts as hung.
        joined: ranks of other hosts, which have connected; None starts all ranks on this host.
        device: of the first rank; the GPUs of the others follow it.
        compilers: number of processes that compile kernels for each rank that is started here.

    Raises:
        ConfigError: on Windows, where a child process cannot inherit descriptors.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float,
        joined: Sequence[JoinedRank] | None = None,
        device: str = "auto",
        compilers: int = 0,
    ) -> None:
        if sys.platform == "win32":
            raise ConfigError("tensor_parallel_size and pipeline_parallel_size above 1 need Linux or macOS")
        self.size, self.timeout_s = size, timeout_s
        self._failure: str | None = None
        self._checked_s = 0.0
        self._working = 0  # number of the work in progress, odd while there is one
        self._closed = threading.Event()
        self._peers: list[_Peer] = []
        self.ring: RingWriter | ChannelRing
        if joined is None:
            self.ring = RingWriter(size - 1)
            self._start_all(self.ring.ends(), device, compilers)
        else:
            self.ring = ChannelRing([one.channel for one in joined])
            self._peers += [_remote(rank, one) for rank, one in enumerate(joined, 1)]
        threading.Thread(target=self._watch, daemon=True, name="rank-watch").start()

    def _start_all(self, ends: Sequence[ReaderEnd], device: str, compilers: int) -> None:
        """Start the processes, or none of them if one cannot be started."""
        try:
            for rank, end in enumerate(ends, 1):
                self._peers.append(_start(rank, end, device, compilers))
        except BaseException:
            self.kill()
            raise

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self._working += 1
        try:
            yield
        finally:
            self._working += 1

    def _watch(self) -> None:
        """End this process if its main thread is blocked, because a rank has ended that a GPU waits for."""
        blocked_in, since_s = 0, 0.0
        while not self._closed.wait(1.0):
            work, now = self._working, time.monotonic()
            ended = [peer for peer in self._peers if peer.process.poll() is not None]
            if not ended or not work % 2 or work != blocked_in:
                blocked_in, since_s = work, now
            elif now - since_s > _BLOCKED_S:
                text = f"{ended[0].name} ended with {ended[0].process.exit_text()}"
                sys.stderr.write(f"quire: the engine ends, because {text}\n")
                sys.stderr.flush()
                os._exit(1)

    def start(self, config: EngineConfig, path: Path) -> None:
        self._host = meeting_host(config.rank_address)
        for rank, peer in enumerate(self._peers, 1):
            own = config if peer.device is None else replace(config, device=peer.device)
            peer.channel.send(encode(StartRank(own, str(path), rank)))

    def send(self, body: bytes) -> None:
        self.ring.send(body, self.check)

    def collect(self) -> list[int]:
        return [self._result_of(peer) for peer in self._peers]

    def spans(self) -> list[Spans]:
        return [peer.spans for peer in self._peers]

    def _result_of(self, peer: _Peer) -> int:
        while not peer.results:
            peer.listen(_POLL_S)
            if peer.errors:
                self.kill()
                raise _error_of(peer.errors[0].kind, f"{peer.name}: {peer.errors[0].cause}")
            self.check()
        return peer.results.popleft()

    def check(self) -> None:
        """Raise EngineDead, naming the rank, if one has failed. Looks at the processes at most every 50 ms."""
        if self._failure is None:
            now = time.monotonic()
            if now - self._checked_s < _POLL_S:
                return
            self._checked_s = now
            self._failure = self._find_failure()
        if self._failure is not None:
            self.kill()
            raise EngineDead(self._failure)

    def open_meeting(self) -> int:
        from quire.parallel.connection import open_store  # deferred, because it imports torch

        self._store = open_store(self.size, self._host)
        return int(self._store.port)

    def executor(self, local: Executor) -> Executor:
        from quire.ranks.executor import GroupExecutor

        return GroupExecutor(local, self)

    def mover(self, local: BlockMover) -> BlockMover:
        from quire.ranks.mover import GroupMover

        return GroupMover(local, self)

    def ended_copies(self) -> list[CopiesEnded]:
        """Return the ends of transfers that the processes have reported since the last call."""
        ends: list[CopiesEnded] = []
        for peer in self._peers:
            peer.listen()
            ends += peer.copies
            peer.copies.clear()
        return ends

    def give_up(self, consequence: BaseException | str) -> EngineDead:
        if isinstance(consequence, BaseException):
            consequence = f"{type(consequence).__name__}: {consequence}".split("\n")[0]
        end_s = time.monotonic() + _CAUSE_S
        while self._failure is None and time.monotonic() < end_s:
            self._failure = self._find_failure()
            time.sleep(_POLL_S)
        behind = [peer.name for index, peer in enumerate(self._peers) if self.ring.lag(index)]
        self._failure = self._failure or (
            f"{', '.join(behind)} made no progress: {consequence}" if behind else f"rank 0: {consequence}"
        )
        self.kill()
        return EngineDead(self._failure)

    def _find_failure(self) -> str | None:
        for peer in self._peers:
            ended = peer.process.poll() is not None
            peer.listen()
            if peer.errors:
                return f"{peer.name}: {peer.errors[0].cause}"
            if ended:
                return f"{peer.name} ended with {peer.process.exit_text()}"
        return None

    def kill(self) -> None:
        self._closed.set()
        for peer in self._peers:
            if peer.process.poll() is None:
                peer.process.kill()
        for peer in self._peers:
            peer.process.wait()

    def close(self) -> None:
        """Wait for the processes, which have been told to stop, and kill those that do not."""
        end_s = time.monotonic() + _STOP_S
        self._closed.set()
        self.ring.close()
        for peer in self._peers:
            peer.channel.close()
        for peer in self._peers:
            try:
                peer.process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                peer.process.kill()
                peer.process.wait()


def _start(rank: int, end: ReaderEnd, device: str, compilers: int) -> _Peer:
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = (compilers, theirs.fileno(), end.memory, end.wake, end.index, end.readers)
        kind, _, first = device.partition(":")
        own = f"{kind}:{int(first) + rank}" if first.isdecimal() else f"{kind}:{rank}"
        command = [sys.executable, "-m", "quire.rank_process", "here", own, *map(str, numbers)]
        process = _LocalProcess(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *end.descriptors()]
        )
    return _Peer(process, Channel(ours), f"rank {rank} (process {process.pid})")


def _remote(rank: int, joined: JoinedRank) -> _Peer:
    name = f"rank {rank} (process {joined.pid} on {joined.host})"
    return _Peer(joined.process, joined.channel, name, joined.device)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"


def _error_of(kind: str, text: str) -> QuireError:
    """Return an error of the class `kind` of quire.types, or EngineDead if there is none."""
    error = getattr(types, kind, None)
    return error(text) if isinstance(error, type) and issubclass(error, QuireError) else EngineDead(text)
