"""Engine outputs become answers: text, stop strings, log-probabilities, n answers, and deltas that add up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.output import OutputAssembler, RequestState
from quire.frontend.processor import InputProcessor
from quire.frontend.tokenizer.backends import BYTE_OF_CHAR, JsonBackend
from quire.frontend.tokenizer.detokenizer import Detokenizer
from quire.frontend.tokenizer.gguf_tokenizer import byte_level_bpe
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer, TokenizerSettings
from quire.types import (
    CompletionOutput,
    EngineOutput,
    EngineOutputs,
    NewTokens,
    RequestFailure,
    SamplingParams,
    TokenLogprobs,
)

EOS = 256


def byte_tokenizer() -> Tokenizer:
    raw = byte_level_bpe(dict(BYTE_OF_CHAR), [], "gpt-2", "test")
    raw.add_special_tokens(["</s>"])
    return Tokenizer(JsonBackend(raw), TokenizerSettings({"eos_token": "</s>"}))


TOKENIZER = byte_tokenizer()


def opened(tokenizer: Tokenizer = TOKENIZER, **params: Any) -> tuple[RequestState, OutputAssembler]:
    processor = InputProcessor(tokenizer, 300, 4096, [EOS])
    prompt = [104, 105] if isinstance(tokenizer, NoTokenizer) else "hi"
    requests = processor.process("r", prompt, SamplingParams(**{"max_tokens": None} | params))
    state = RequestState("r", "hi", requests, tokenizer, arrival_s=1.0)
    assembler = OutputAssembler()
    assembler.add(state)
    return state, assembler


def test_a_plain_answer() -> None:
    state, assembler = opened()
    assert not state.output().finished and state.output().outputs[0].text == ""
    applied = assembler.apply([EngineOutput("r", [111], num_cached_tokens=2)], now_s=2.0)
    assert applied.changed == [state] and applied.aborts == []
    assembler.apply([EngineOutput("r", [107, EOS], finish_reason="stop")], now_s=3.0)
    out = state.output()
    assert (
        out.finished
        and out.prompt_token_ids == [104, 105]
        and out.prompt == "hi"
        and out.num_cached_tokens == 2
    )
    (answer,) = out.outputs
    assert (answer.text, answer.token_ids) == ("ok", [111, 107, EOS])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert out.metrics and (out.metrics.first_token_s, out.metrics.finished_s) == (2.0, 3.0)
    assert len(assembler) == 0


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_the_stop_token_is_shown_only_when_asked(include: bool, text: str) -> None:
    state, assembler = opened(stop_token_ids=[98], include_stop_str_in_output=include)
    assembler.apply([EngineOutput("r", [97, 98], finish_reason="stop", stop_reason=98)])
    answer = state.output().outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, [97, 98], 98)


@pytest.mark.parametrize(("include", "text"), [(False, "ab "), (True, "ab END")])
def test_a_stop_string_aborts_the_engine_request(include: bool, text: str) -> None:
    state, assembler = opened(stop=["END"], include_stop_str_in_output=include)
    assert assembler.apply([EngineOutput("r", list(b"ab EN"))]).aborts == []
    assert state.output().outputs[0].text == "ab ", "the beginning of a stop string is held back"
    applied = assembler.apply([EngineOutput("r", list(b"Dxyz"))])
    assert applied.aborts == ["r"] and applied.changed == [state]
    answer = state.output().outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", "END")
    assert bytes(answer.token_ids) == b"ab END", "tokens end with the one that completed the stop string"
    late = assembler.apply([EngineOutput("r", [1]), EngineOutput("r", [], finish_reason="abort")])
    assert late.changed == [] and late.aborts == [] and state.output().outputs[0].finish_reason == "stop"


def test_outputs_after_the_end_change_nothing() -> None:
    state, _ = opened(stop=["b"])
    assert state.apply(EngineOutput("r", list(b"ab")))
    assert not state.apply(EngineOutput("r", list(b"c"), finish_reason="abort"))
    answer = state.output().outputs[0]
    assert (bytes(answer.token_ids), answer.text, answer.finish_reason) == (b"ab", "a", "stop")


def test_no_abort_for_what_the_engine_has_ended_itself() -> None:
    state, assembler = opened(stop=["b"])
    applied = assembler.apply([EngineOutput("r", [97, 98], finish_reason="length")])
    assert applied.aborts == [] and state.output().outputs[0].finish_reason == "stop"


def test_held_back_text_comes_out_at_the_end() -> None:
    state, assembler = opened(stop=["END"])
    assembler.apply([EngineOutput("r", [*b"xEN", 0xE2, 0x82], finish_reason="length")])
    answer = state.output().outputs[0]
    assert (answer.text, answer.finish_reason) == ("xEN\ufffd", "length")


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    state, assembler = opened(stop=["b"], min_tokens=3)
    assert assembler.apply([EngineOutput("r", list(b"bbbab"))]).aborts == ["r"]
    assert state.output().outputs[0].text == "bbba"


@pytest.mark.parametrize("together", [True, False])
def test_a_stop_string_may_begin_before_min_tokens_and_end_behind(together: bool) -> None:
    for stops, text, shown in (
        (["END"], "xENDyEND", "xENDy"),  # the first ends with the fourth token, the last of min_tokens
        (["END"], "xxEND", "xx"),
        (["ENDE"], "xENDE", "x"),
        (["N", "xxENDS"], "xxENDN", "xxEND"),  # N ends within what is held back for the longer one
        (["END", "NDx"], "aENDx", "aE"),
        (["aEND"], "aENDaENDq", "aEND"),
    ):
        state, assembler = opened(stop=stops, min_tokens=4)
        pieces = [list(text.encode())] if together else [[byte] for byte in text.encode()]
        for piece in pieces:
            if assembler.apply([EngineOutput("r", piece)]).aborts:
                break
        answer = state.output().outputs[0]
        assert (answer.text, answer.finish_reason) == (shown, "stop"), stops


def test_log_probabilities() -> None:
    state, assembler = opened(logprobs=2, prompt_logprobs=1)
    assert not state.is_scored and opened()[0].is_scored
    found = [
        TokenLogprobs([98, 97, 98], [-1.0, -0.5, -1.0], 2),
        TokenLogprobs([0xE2, 97, 98], [-3.0, -0.5, -1.0], 9),
    ]
    prompt = [TokenLogprobs([105, 97], [-2.0, -0.1], 4)]
    assembler.apply([EngineOutput("r", [], prompt_logprobs=prompt, prompt_logprobs_start=1)])
    assert state.is_scored
    assembler.apply(
        [EngineOutput("r", [98, 0xE2], logprobs=found, prompt_logprobs=prompt, prompt_logprobs_start=1)]
    )
    out = state.output()
    answer = out.outputs[0]
    assert answer.cumulative_logprob == -4.0 and answer.logprobs is not None
    first = answer.logprobs[0]
    assert (
        list(first) == [98, 97]
        and first[98].rank == 2
        and first[97].rank == 1
        and first[97].decoded_token == "a"
    )
    assert list(answer.logprobs[1]) == [0xE2, 97, 98] and answer.logprobs[1][0xE2].rank == 9
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == 2 and out.prompt_logprobs[1] is not None
    assert out.prompt_logprobs[1][105].logprob == -2.0 and out.prompt_logprobs[1][105].decoded_token == "i"


def test_log_probabilities_end_with_the_tokens() -> None:
    state, assembler = opened(logprobs=0, stop=["b"])
    found = [TokenLogprobs([i], [-1.0], 1) for i in b"abc"]
    assembler.apply([EngineOutput("r", list(b"abc"), logprobs=found)])
    answer = state.output().outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 2 and answer.cumulative_logprob == -2.0


def taken(state: RequestState) -> list[CompletionOutput]:
    return [delta for answer in state.answers if (delta := answer.take_delta()) is not None]


def test_n_answers_are_merged() -> None:
    state, assembler = opened(n=2, stop=["z"])
    assert state.open_ids == ["r#0", "r#1"] and len(assembler) == 1
    applied = assembler.apply([EngineOutput("r#1", list(b"bz")), EngineOutput("r#0", list(b"a"))])
    assert applied.aborts == ["r#1"] and applied.changed == [state] and not state.finished
    deltas = taken(state)
    assert [(o.index, o.text, o.finish_reason) for o in deltas] == [(0, "a", None), (1, "b", "stop")]
    assembler.apply([EngineOutput("r#0", [99], finish_reason="length")])
    assert state.finished and [o.text for o in state.output().outputs] == ["ac", "b"]
    assert [(o.index, o.text) for o in taken(state)] == [(0, "c")], "a finished answer has no more news"
    assert taken(state) == []


@pytest.mark.parametrize("bare", [True, False])
def test_token_ids_alone(bare: bool) -> None:
    state, assembler = opened(NoTokenizer()) if bare else opened(detokenize=False, logprobs=0)
    entry = None if bare else [TokenLogprobs([97], [-1.0], 1)]
    assembler.apply([EngineOutput("r", [97], logprobs=entry)])
    assembler.apply([EngineOutput("r", [], finish_reason="length")])
    answer = state.output().outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [97], "length")


def test_abort_and_failure() -> None:
    state, assembler = opened(n=2, stop=["END"])
    assembler.apply([EngineOutput("r#0", list(b"aE")), EngineOutput("r#1", [98], finish_reason="length")])
    assert assembler.abort(state) == ["r#0"] and state.finished and len(assembler) == 0
    assert [(o.text, o.finish_reason) for o in state.output().outputs] == [("aE", "abort"), ("b", "length")]
    state, assembler = opened()
    assembler.apply([EngineOutput("r", [], finish_reason="error", error=RequestFailure("no room"))])
    assert state.error == RequestFailure("no room") and state.finished


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("ab é😀"), max_size=20),
    st.lists(st.text(st.sampled_from("ab é"), min_size=1, max_size=3), max_size=2),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_deltas_add_up_to_the_answer_in_any_steps(
    text: str, stops: list[str], seed: int, include: bool
) -> None:
    rng = random.Random(seed)
    ids = list(text.encode())
    state, assembler = opened(stop=stops, include_stop_str_in_output=include)
    whole, _ = opened(stop=stops, include_stop_str_in_output=include)
    whole.apply(EngineOutput("r", ids, finish_reason="length"))
    seen_text, seen_ids, ends = "", [], 0
    while not state.finished:
        step = ids[: rng.randrange(1, 5)]
        ids = ids[len(step) :]
        if ids and len(step) == 1 and rng.random() < 0.7:
            assembler.apply(EngineOutputs([NewTokens(["r"], step)]))
        else:
            assembler.apply([EngineOutput("r", step, finish_reason=None if ids else "length")])
        if rng.random() < 0.7 or state.finished:
            for delta in taken(state):
                seen_text += delta.text
                seen_ids += delta.token_ids
                ends += delta.finish_reason is not None
                assert "\ufffd" not in delta.text
    answer, expected = state.output().outputs[0], whole.output().outputs[0]
    assert (seen_text, seen_ids, ends) == (answer.text, answer.token_ids, 1)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (
        expected.text,
        expected.finish_reason,
        expected.stop_reason,
    )
    assert answer.token_ids == expected.token_ids


def test_tokens_in_columns_stop_only_their_requests() -> None:
    state, assembler = opened(n=3, stop=["b"], max_tokens=9)
    names = ["r#0", "r#1", "r#2"]
    for name in names:
        assembler.apply([EngineOutput(name, [97])])
    applied = assembler.apply(EngineOutputs([NewTokens(["x", *names], [98, 97, 98, 97])]))
    assert (applied.changed, applied.aborts) == ([state], ["r#1"])
    late = assembler.apply(EngineOutputs([NewTokens(names, [97] * 3)]))
    assert late.changed == [state] and not late.aborts and len(assembler) == 1
    answers = state.output().outputs
    assert [answer.text for answer in answers] == ["aaa", "a", "aaa"]
    assert [answer.finish_reason for answer in answers] == [None, "stop", None]


def test_text_is_decoded_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[list[int]] = []
    push = Detokenizer.push

    def watched(self: Detokenizer, ids: Sequence[int]) -> str:
        pushed.append(list(ids))
        return push(self, ids)

    monkeypatch.setattr(Detokenizer, "push", watched)
    state, assembler = opened()
    for byte in b"abc":
        assembler.apply([EngineOutput("r", [byte])])
    assert not pushed
    assert state.output().outputs[0].text == "abc" and pushed == [list(b"abc")]
    state, assembler = opened(stop=["c"])
    assert assembler.apply([EngineOutput("r", list(b"ab"))]).aborts == []
    assert assembler.apply([EngineOutput("r", list(b"cd"))]).aborts == ["r"], (
        "a stop string is looked for at once"
    )
