"""Large requests of one client are processed in pieces, so that other clients do not wait for all of them."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response

from quire import engine_process
from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import Channel
from quire.serve.http import stream as stream_module
from quire.serve.http.stream import complete_response
from quire.types import EngineOutputs


class SlowIntake:
    """An engine that always has work and takes 2 ms to abort a request."""

    has_work = True
    scheduler = SimpleNamespace(connector=SimpleNamespace(notes=()))

    def __init__(self) -> None:
        self.aborted = 0
        self.taken_before_step: list[int] = []

    def abort(self, request_id: str) -> None:
        time.sleep(0.002)
        self.aborted += 1

    def step(self) -> EngineOutputs:
        self.taken_before_step.append(self.aborted)
        return EngineOutputs([])


def test_steps_run_while_requests_are_taken_in() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    for _ in range(100):
        ours.send(msg.encode(msg.Abort(["x"])))
    ours.send(msg.encode(msg.StopEngine()))
    engine = SlowIntake()
    engine_process.serve(engine, theirs, os.getppid())  # type: ignore[arg-type]
    assert engine.aborted == 100
    assert len(engine.taken_before_step) >= 5 and engine.taken_before_step[0] < 50
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("tokens", "logprobs", "threaded"), [(5, None, False), (5000, None, True), (500, 20, True)]
)
def test_large_answers_are_written_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tokens: int, logprobs: int | None, threaded: bool
) -> None:
    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(stream_module, "wait_until_finished", nothing)
    params = SimpleNamespace(logprobs=logprobs, prompt_logprobs=None)
    generation = SimpleNamespace(completion_tokens=tokens, states=[SimpleNamespace(params=params)])
    names: list[str] = []

    def make() -> dict[str, int]:
        names.append(threading.current_thread().name)
        return {"a": 1}

    async def run() -> Response:
        return await complete_response(None, generation, make, asyncio.to_thread)  # type: ignore[arg-type]

    answer = asyncio.run(run())
    assert answer.body == b'{"a":1}' and answer.headers["content-type"] == "application/json"
    assert (names != ["MainThread"]) == threaded
