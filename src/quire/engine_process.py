"""The engine process: builds an engine, then alternates between its socket and the step loop.

Started by `ProcessClient` with the socket's address and the parent's process id; ends with Stop, with the
parent's death, or with an error, which it reports as its last message.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import zmq

from quire.core.engine import Engine
from quire.core.live import live_of
from quire.core.stats import figures_of, load_of, stats_of
from quire.frontend import messages as msg
from quire.frontend.client import describe, refusal
from quire.start import start_engine
from quire.types import EngineInfo, QuireError, RequestError

_IDLE_POLL_MS = 1000  # how often an idle engine looks whether its parent is still there
_QUIET_S = 1.0  # without work, before later steps are prepared: who comes meanwhile waits for that
_GONE_MS = 5000  # a message that cannot be sent for so long has nobody to read it


def main(address: str, parent: int) -> int:
    # Ctrl-C and a supervisor's SIGTERM go to the client too, which ends us when its requests are done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.SNDTIMEO, _GONE_MS)
    socket.connect(address)
    try:
        while not socket.poll(_IDLE_POLL_MS):
            if os.getppid() != parent:
                return 1
        start = msg.decode_to_engine(socket.recv())
        assert isinstance(start, msg.Start)
        engine, info = _build(start)
        socket.send(msg.encode(msg.Ready(info)))
        serve(engine, socket, parent)
        engine.close()
        return 0
    except zmq.Again:  # the client is gone: there is nobody to tell
        return 1
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, QuireError) else "EngineDead"
        with contextlib.suppress(zmq.Again):
            socket.send(msg.encode(msg.Died(kind, describe(error))))
        if not isinstance(error, QuireError):
            raise
        return 1
    finally:
        socket.close(linger=1000)
        if os.getppid() != parent:  # nobody else is left to remove the socket and its folder
            path = address.removeprefix("ipc://")
            with contextlib.suppress(OSError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))


def _build(start: msg.Start) -> tuple[Engine, EngineInfo]:
    if start.dry_run_step_s is not None:
        from quire.dry_run import build_dry_run

        return build_dry_run(start.config, start.dry_run_step_s)
    return start_engine(start.config)


def serve(engine: Engine, socket: zmq.Socket[bytes], parent: int) -> None:
    """Take what has arrived, run a step, send what it brought; wait only when there is nothing to do."""
    received = told = 0  # requests taken in, and how many of them the client knows of
    steps_told = 0
    worked_s = time.monotonic()
    while os.getppid() == parent:
        quiet = time.monotonic() - worked_s >= _QUIET_S
        busy = engine.has_work or (quiet and not socket.poll(0) and engine.idle())
        wait_ms = 0 if busy else _IDLE_POLL_MS
        refused = []
        while socket.poll(wait_ms):
            wait_ms = 0
            match msg.decode_to_engine(socket.recv()):
                case msg.Add(request):
                    received += 1
                    try:
                        engine.add(request)
                    except RequestError as error:
                        refused.append(refusal(request, error))
                case msg.Abort(ids):
                    for request_id in ids:
                        engine.abort(request_id)
                case msg.AskStats():
                    socket.send(msg.encode(msg.Stats(stats_of(engine, received))))
                case msg.AskLive(since):
                    socket.send(msg.encode(msg.Live(live_of(engine, received, since))))
                case msg.Stop():
                    return
        outputs = refused
        if engine.has_work:
            outputs = refused + engine.step()
            worked_s = time.monotonic()
            if not engine.has_work:
                engine.check()
        if outputs or received > told:
            told = received
            figures = figures_of(engine, steps_told)
            steps_told = engine.log.ended
            socket.send(msg.encode(msg.Outputs(outputs, load_of(engine, received), figures)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
