"""The engine process: it builds an engine, then alternates between its channel and the step loop.

A client starts it as `python -m quire.engine_process FILE PARENT`: the file descriptor of its end of the channel, and the
process id of the client. On another host it is `python -m quire.engine_process connect ADDRESS`, with a token on standard
input, and it connects to the client. It ends with a StopEngine message, with the death of the client, or with an error, which it
reports in its last message.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.engine import Engine
from quire.core.live_state import live_of
from quire.core.stats import figures_of, load_of, stats_of
from quire.frontend.client import ipc as msg
from quire.frontend.client.base import error_text, refused_output
from quire.frontend.client.channel import Channel, hangup_poller
from quire.start import start_engine
from quire.types import EngineDead, EngineInfo, OutputPart, QuireError, RequestError

# Interval at which an idle engine checks that its parent is alive.
_IDLE_POLL_S = 1.0
# Time without work before the engine prepares later steps, which delays requests that arrive in the meantime.
_QUIET_S = 1.0
# Limit on reading requests between two steps: a burst of arrivals must not stall running requests.
_INTAKE_S = 0.01
# Limit on sending the last message.
_FAREWELL_S = 5.0
# Interval at which the watch over the client ends once the engine is built.
_START_POLL_S = 0.5
# Limit on the connection to a client on another host.
_CONNECT_S = 60.0


def connect_to_client(address: str) -> socket.socket:
    """Return a connection to a client on another host, which has started this process through another one."""
    from quire.frontend.client.remote import Hello, connect, own_address, split_address

    host, port = split_address(address, "address")
    hello = Hello(sys.stdin.readline().strip(), own_address(host), os.getpid())
    return connect(host, port, hello, _CONNECT_S)


def main(end: socket.socket, parent: int) -> int:
    """Run the engine process.

    Args:
        end: the socket to the client.
        parent: process id of the process that has started this one; it ends with it.

    Returns:
        The exit code.
    """
    # Ctrl-C and a supervisor's SIGTERM also reach the client, which stops this process when its requests are done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(end)
    try:
        while not channel.poll(_IDLE_POLL_S):
            if os.getppid() != parent:
                return 1
        start = msg.decode_to_engine(channel.receive())
        assert isinstance(start, msg.StartEngine)
        with _ending_with_client(end):
            engine, info = _build(start)
        channel.send(msg.encode(msg.EngineReady(info)))
        serve(engine, channel, parent)
        engine.close()
        return 0
    except EOFError:  # the client is gone, so there is nothing to report to
        return 1
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, QuireError) else "EngineDead"
        channel.send(msg.encode(msg.EngineFailed(kind, error_text(error))))
        channel.settle(_FAREWELL_S)
        if isinstance(
            error, EngineDead
        ):  # a rank failed: the usual clean-up would wait for kernels that wait for it
            os._exit(1)
        if not isinstance(error, QuireError):
            raise
        return 1
    finally:
        channel.close()


@contextmanager
def _ending_with_client(end: socket.socket) -> Iterator[None]:
    """End this process if the client closes its end inside this context, in which no message is read."""
    left = threading.Event()

    def watch() -> None:
        poller = hangup_poller(end)
        while not left.is_set():
            if poller.poll(1000 * _START_POLL_S) and not left.is_set():
                os._exit(1)

    threading.Thread(target=watch, daemon=True, name="client-watch").start()
    try:
        yield
    finally:
        left.set()


def _build(start: msg.StartEngine) -> tuple[Engine, EngineInfo]:
    if start.dry_run_step_s is not None:
        from quire.dry_run import build_dry_run

        return build_dry_run(start.config, start.dry_run_step_s, start.secret)
    return start_engine(start.config, start.secret, start.exports)


def serve(engine: Engine, channel: Channel, parent: int) -> None:
    """Run the step loop until StopEngine arrives or the parent dies.

    Each round reads the messages that have arrived, runs a step and sends its outputs. It waits only if there is
    nothing to do.

    Args:
        engine: the engine to run.
        channel: the channel to the client.
        parent: process id of the client.
    """
    received = reported = 0  # requests received, and how many of them the client has been told of
    reported_steps = 0
    told: list[str] = []  # the notes that the client has
    worked_s = time.monotonic()
    is_checked = True  # the books, since the last step
    while os.getppid() == parent:
        quiet = time.monotonic() - worked_s >= _QUIET_S
        busy = engine.has_work or (quiet and not channel.poll() and engine.idle())
        wait_s = 0.0 if busy else _IDLE_POLL_S
        refused: list[OutputPart] = []
        intake_end_s = time.monotonic() + _INTAKE_S
        while channel.poll(wait_s) and not (engine.has_work and time.monotonic() > intake_end_s):
            wait_s = 0.0
            match msg.decode_to_engine(channel.receive()):
                case msg.Add(request):
                    received += 1
                    try:
                        engine.add(request)
                    except RequestError as error:
                        refused.append(refused_output(request, error))
                case msg.Abort(ids):
                    for request_id in ids:
                        engine.abort(request_id)
                case msg.AskStats(owner):
                    channel.send(msg.encode(msg.Stats(stats_of(engine, received, owner))))
                case msg.AskLive(since, owner):
                    channel.send(msg.encode(msg.Live(live_of(engine, received, since, owner))))
                case msg.Ping():
                    channel.send(msg.encode(msg.Pong()))
                case msg.StopEngine():
                    return
        outputs: list[OutputPart] = refused
        if engine.has_work:
            outputs = refused + engine.step().parts
            worked_s, is_checked = time.monotonic(), False
        notes = list(engine.scheduler.connector.notes)
        if outputs or received > reported or notes != told:
            reported, told = received, notes
            figures = figures_of(engine, reported_steps)
            reported_steps = engine.log.ended
            load, names = load_of(engine, received), engine.journal.take()
            channel.send(msg.encode(msg.Outputs(outputs, load, figures, names)))
        if not (is_checked or engine.has_work):  # after the outputs are sent, so that no client waits for it
            engine.check()
            is_checked = True


if __name__ == "__main__":
    if sys.argv[1] == "connect":
        sys.exit(main(connect_to_client(sys.argv[2]), os.getppid()))
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
