"""Streams: delivery of new output to generations, and chunk templates."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from quire.frontend.output import RequestState
from quire.serve.answer.generation import Generation
from quire.serve.api.protocol.completions import CompletionChoice, CompletionResponse
from quire.serve.http.errors import ApiError
from quire.serve.http.stream import MARK, ChunkTemplate, event
from quire.types import EngineOutput, EngineRequest, SamplingParams


def opened(interval: int = 1) -> tuple[Generation, RequestState]:
    state = RequestState("r", None, [EngineRequest("r", [1], SamplingParams())], None, 0.0)
    return Generation([state], [], interval, lambda generation: None), state


def tell(generation: Generation, state: RequestState, *tokens: int, reason: str | None = None) -> None:
    state.apply(EngineOutput("r", list(tokens), reason), 0.0)  # type: ignore[arg-type]
    generation.changed(state)


def test_what_is_new_is_taken_then_and_there_until_there_is_no_room() -> None:
    async def run() -> None:
        generation, state = opened()
        taken: list[list[int]] = []
        room = True

        def take() -> bool:
            taken.append([token for _, delta in generation.take() for token in delta.token_ids])
            return room

        waiting = asyncio.ensure_future(generation.wait(take))
        await asyncio.sleep(0)
        tell(generation, state, 5)
        tell(generation, state, 6, 7)
        assert taken == [[5], [6, 7]]
        await asyncio.sleep(0)
        assert not waiting.done(), "nobody is woken for it"
        room = False
        tell(generation, state, 8)
        tell(generation, state, 9)
        await waiting
        assert taken == [[5], [6, 7], [8]], "what has no room waits"
        assert [delta.token_ids for _, delta in generation.take()] == [[9]]
        tell(generation, state, 10, reason="length")
        await generation.wait(take)
        assert generation.finished and len(taken) == 3, "the end is the waiter's"
        assert [delta.token_ids for _, delta in generation.take()] == [[10]]

    asyncio.run(run())


def test_tokens_are_taken_together_after_the_first_one() -> None:
    async def run() -> None:
        generation, state = opened(interval=3)
        taken: list[list[int]] = []

        def take() -> bool:
            taken.append([token for _, delta in generation.take() for token in delta.token_ids])
            return True

        waiting = asyncio.ensure_future(generation.wait(take))
        await asyncio.sleep(0)
        for token in range(8):
            tell(generation, state, token)
        assert taken == [[0], [1, 2, 3], [4, 5, 6]]
        tell(generation, state, 8, 9, 10)  # several tokens of a step
        assert taken[3:] == [[7, 8, 9, 10]]
        tell(generation, state, 11, reason="length")
        await waiting
        assert [delta.token_ids for _, delta in generation.take()] == [[11]], "the end waits for no interval"

    asyncio.run(run())


@pytest.mark.parametrize("interval", [1, 3])
def test_a_choice_does_not_wait_for_others(interval: int) -> None:
    async def run() -> None:
        requests = [EngineRequest(name, [1], SamplingParams(n=2)) for name in ("a", "b")]
        state = RequestState("r", None, requests, None, 0.0)
        generation = Generation([state], [], interval, lambda generation: None)
        taken: list[list[int]] = []

        def take() -> bool:
            taken.append([token for _, delta in generation.take() for token in delta.token_ids])
            return True

        waiting = asyncio.ensure_future(generation.wait(take))
        await asyncio.sleep(0)
        for name, token, reason in [
            ("a", 1, None),
            ("b", 2, "length"),
            *(("a", 3 + i, None) for i in range(6)),
        ]:
            state.apply(EngineOutput(name, [token], reason), 0.0)  # type: ignore[arg-type]
            generation.changed(state)
        assert taken[:2] == [[1], [2]], "the first token and the end of a choice wait for nothing"
        assert [len(tokens) for tokens in taken[2:]] == [interval] * (6 // interval)
        waiting.cancel()

    asyncio.run(run())


def test_errors_are_those_of_who_waits() -> None:
    async def run() -> None:
        generation, state = opened()
        waiting = asyncio.ensure_future(generation.wait(lambda: 1 / 0 > 0))
        await asyncio.sleep(0)
        tell(generation, state, 5)
        with pytest.raises(ZeroDivisionError):
            await waiting
        generation.fail(ApiError(504, "too late"))
        with pytest.raises(ApiError, match="too late"):
            await generation.wait(lambda: True)

    asyncio.run(run())


@pytest.mark.parametrize("text", ["", "a", 'quote " \\ \n\t\x00', "héé 😀 \u2028", MARK])
def test_a_mould_makes_the_very_bytes(text: str) -> None:
    def chunk(text: str) -> CompletionResponse:
        choice = CompletionChoice(3, text)
        return CompletionResponse(
            id=f'a"{MARK}', created=1, model="m", system_fingerprint="f", choices=[choice], usage=None
        )

    assert ChunkTemplate(chunk(MARK)).render(text) == event(chunk(text))
    assert msgspec.json.decode(event(chunk(text))[6:])["choices"][0]["text"] == text
