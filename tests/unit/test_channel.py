"""Messages between processes arrive whole and in order; sending never blocks; none is lost when the sender ends."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from quire.frontend.client import ipc
from quire.frontend.client.base import refused_output
from quire.frontend.client.channel import Channel
from quire.types import (
    EngineLoad,
    EngineOutput,
    EngineRequest,
    Figures,
    NewTokens,
    RequestError,
    RequestFailure,
    SamplingParams,
    StepFailed,
)


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def received(end: Channel, count: int) -> list[bytes]:
    found = []
    while len(found) < count:
        assert end.poll(5)
        found.append(end.receive())
    return found


def test_messages_of_all_sizes_come_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    r = random.Random(0)
    bodies = [r.randbytes(r.choice([0, 1, 3, 100, 70_000, 900_000])) for _ in range(60)]
    sent = [one.send(body) for body in bodies]
    assert not all(sent), "more than the socket takes"
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(received(other, len(bodies))))
    reader.start()
    assert one.settle(10)
    reader.join(10)
    assert found == bodies


def test_both_can_send_more_than_fits_before_either_reads(ends: tuple[Channel, Channel]) -> None:
    bodies = [bytes([i]) * 300_000 for i in range(20)]
    for end in ends:
        sent = [end.send(body) for body in bodies]
        assert not all(sent)
    found: dict[int, list[bytes]] = {0: [], 1: []}
    while sum(map(len, found.values())) < 40:
        for i, end in enumerate(ends):
            if end.poll():
                found[i].append(end.receive())
    assert found == {0: bodies, 1: bodies}


def test_a_poll_without_a_message_ends(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert not one.poll() and not one.poll(0.01)
    other.send(b"")
    assert one.poll() and one.receive() == b"" and not one.poll()


def test_last_words_are_read_before_the_end(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(b"to nobody")
    other.send(b"a")
    other.send(b"b")
    other.close()
    one.send(b"lost")
    assert received(one, 2) == [b"a", b"b"]
    for _ in range(2):
        with pytest.raises(EOFError):
            one.poll(5)
    assert one.send(b"still no error")


def test_tokens_in_columns_arrive_as_outputs_in_order(ends: tuple[Channel, Channel]) -> None:
    engine, client = ends
    last = EngineOutput("a", [3], "stop")
    parts = [EngineOutput("b", [7]), NewTokens(["a", "b"], [1, 2]), last]
    engine.send(ipc.encode(ipc.Outputs(parts, EngineLoad(), Figures())))
    message = ipc.decode_to_client(received(client, 1)[0])
    assert isinstance(message, ipc.Outputs)
    outputs = message.outputs
    assert outputs and outputs.ended == [last]
    assert list(outputs) == [EngineOutput("b", [7]), EngineOutput("a", [1]), EngineOutput("b", [2]), last]


def test_a_refusal_keeps_field_and_code_across_processes(ends: tuple[Channel, Channel]) -> None:
    engine, client = ends
    error = RequestError("prompt has 9 tokens", param="prompt", code="context_length_exceeded")
    outputs = [refused_output(EngineRequest("r", [1], SamplingParams()), error)]
    engine.send(ipc.encode(ipc.Outputs(outputs, EngineLoad(), Figures())))
    message = ipc.decode_to_client(received(client, 1)[0])
    assert isinstance(message, ipc.Outputs)
    failure = message.outputs[0].error
    assert failure is not None
    raised = failure.as_error()
    assert isinstance(raised, RequestError) and str(raised) == str(error)
    assert (raised.param, raised.code) == ("prompt", "context_length_exceeded")
    assert isinstance(RequestFailure("no memory", internal=True).as_error(), StepFailed)
