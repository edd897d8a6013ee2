"""The process of a rank other than the first: it builds its part of the model, then runs the plans of the host.

The host starts it as `python -m quire.rank_process here DEVICE COMPILERS CHANNEL MEMORY WAKE INDEX READERS`: its device,
the number of processes that compile kernels for it, file descriptors of its end of the channel, of the ring's memory and
of the pipe that wakes it, and its place among the readers of the ring. On another host `quire rank` starts it as `python -m quire.rank_process connect ADDRESS DEVICE`, with the
token on standard input. It ends with
the host, with a STOP message, or with an error, which it reports in its last message.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from quire.compilers import NO_COMPILERS, Compilers
from quire.frontend.client.base import error_text
from quire.frontend.client.channel import Channel, hangup_poller
from quire.frontend.client.remote import Hello, connect, own_address, split_address
from quire.ranks import messages as msg
from quire.ranks.remote import ChannelReader
from quire.ranks.ring import ReaderEnd, RingReader
from quire.ranks.timeline import PhaseSpans
from quire.start import compilers_for, wake_gpu
from quire.types import QuireError, StepHandle, TransferEnd

_FAREWELL_S = 5.0  # limit on sending the last message
_START_S = 600.0  # limit on the wait for the first message: ranks of other hosts may come late
_CONNECT_S = 600.0  # limit on the wait for the first rank to listen


class PlanReader(Protocol):
    """The source of plans and phases."""

    def receive(self) -> bytes | bytearray:
        """Wait for the next message. Raises EOFError if the host is gone."""
        ...


def main_here(device: str, compilers: int, channel_file: int, end: ReaderEnd) -> int:
    """Run a rank on the host of the first one, and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they also reach the host, which stops this process
        signal.signal(number, signal.SIG_IGN)
    raw = socket.socket(fileno=channel_file)
    with closing(compilers_for(device, compilers)) as processes:
        return _main(raw, Channel(raw), lambda channel: RingReader(end), device, processes)


def main_elsewhere(address: str, device: str) -> int:
    """Run a rank on another host than the first one, and return the exit code."""
    host, port = split_address(address)
    token = sys.stdin.readline().strip()
    raw = connect(host, port, Hello(token, own_address(host), os.getpid(), device), _CONNECT_S)
    return _main(raw, Channel(raw), ChannelReader, device, NO_COMPILERS)


def _main(
    raw: socket.socket,
    channel: Channel,
    make_reader: Callable[[Channel], PlanReader],
    device: str,
    compilers: Compilers,
) -> int:
    threading.Thread(target=_end_with_host, args=(raw,), daemon=True, name="host-watch").start()
    # The driver takes a second or more, in which torch can be imported.
    threading.Thread(target=wake_gpu, args=(device,), daemon=True).start()
    times = PhaseSpans()
    try:
        with times.during("import"):
            import quire.rank  # noqa: F401  (imports torch, while the host does the same)
        if not channel.poll(_START_S):
            return 1
        run_rank(msg.decode_start(channel.receive()), channel, make_reader(channel), times, compilers)
        return 0
    except EOFError:  # the host is gone
        return 1
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, QuireError) else "EngineDead"
        channel.send(msg.encode(msg.RankError(kind, error_text(error))))
        channel.settle(_FAREWELL_S)
        if not isinstance(error, QuireError):
            sys.excepthook(type(error), error, error.__traceback__)
        return 1


def _end_with_host(channel: socket.socket) -> None:
    """End this process when the host's end of the channel closes, even while a step waits for other ranks."""
    hangup_poller(channel).poll()
    os._exit(1)


def run_rank(
    start: msg.StartRank,
    channel: Channel,
    plans: PlanReader,
    times: PhaseSpans,
    compilers: Compilers = NO_COMPILERS,
) -> None:
    """Make a rank, and run what the host's messages ask for until one of them says to end.

    Args:
        start: the engine's settings and this rank's number.
        channel: takes results and errors back to the host.
        plans: gives the host's messages.
        times: measures the phases of the start.
        compilers: the processes that compile the rank's kernels.

    Raises:
        EOFError: the host is gone.
    """
    from quire.frontend.location import locate_model
    from quire.models.config.load import load_spec
    from quire.rank import Rank
    from quire.wiring import queue_depth
    from quire.worker.executor import LocalExecutor

    with times.during("config"):
        path = Path(start.path)
        if not path.exists():  # another host keeps its files elsewhere
            path = locate_model(start.config.model, start.config.revision).path
        rank = Rank(start.config, path, load_spec(path), start.rank, compilers=compilers)
    channel.send(msg.encode(msg.PhaseEnded(0, times.spans)))
    executor: LocalExecutor | None = None
    in_flight: deque[StepHandle] = deque()
    depth = queue_depth(start.config)

    def report(end: TransferEnd) -> None:  # in a thread of the mover
        channel.send(msg.encode(msg.CopiesEnded(*end)))
        channel.settle(_FAREWELL_S)

    with rank.guard():
        while True:
            message = memoryview(plans.receive())
            match message[0]:
                case msg.PHASE:
                    phase, argument = msg.decode_phase(message[1:])
                    with times.during(phase):
                        result = rank.run_phase(phase, argument)
                    channel.send(msg.encode(msg.PhaseEnded(result, times.spans)))
                case msg.FORWARD:
                    executor = executor or LocalExecutor(rank.runner, rank.guard)
                    executor.forward(msg.decode_forward(message[1:]))
                case msg.SAMPLE:
                    assert executor is not None
                    in_flight.append(executor.sample(*msg.decode_sample(message[1:])))
                    if len(in_flight) > depth:  # buffers are used again after so many steps
                        in_flight.popleft().wait()
                case msg.WARM_UP:
                    executor = executor or LocalExecutor(rank.runner, rank.guard)
                    executor.warm_up()
                case msg.TRANSFER:
                    assert rank.mover is not None
                    rank.mover.report_to(report)
                    orders, drops = msg.decode_transfer(message[1:])
                    rank.mover.start(orders)
                    rank.mover.drop(drops)
                case msg.STOP:
                    return


if __name__ == "__main__":
    # Without the usual clean-up, which would wait for kernels that wait for other ranks.
    if sys.argv[1] == "connect":
        code = main_elsewhere(*sys.argv[2:])
    else:
        code = main_here(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), ReaderEnd(*map(int, sys.argv[5:])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
