"""Prompts and parameters become engine requests; what cannot be served is refused in one sentence."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from quire.frontend import length
from quire.frontend.processor import InputProcessor
from quire.frontend.tokenizer.backends import BYTE_OF_CHAR, JsonBackend
from quire.frontend.tokenizer.gguf_tokenizer import byte_level_bpe
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer, TokenizerSettings
from quire.types import RequestError, SamplingParams

VOCAB = 300


def byte_tokenizer() -> Tokenizer:
    """Build a tokenizer with one token per byte, one merge, and a leading begin-of-sequence token (257)."""
    vocab = dict(BYTE_OF_CHAR) | {"Ġx": 256}
    raw = byte_level_bpe(vocab, [("Ġ", "x")], "gpt-2", "test")
    raw.add_special_tokens(["<s>", "</s>"])
    settings = TokenizerSettings({"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True)
    return Tokenizer(JsonBackend(raw), settings)


TOKENIZER = byte_tokenizer()


def processor(**changes: Any) -> InputProcessor:
    options: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "vocab_size": VOCAB,
        "max_model_len": 20,
        "eos_ids": [258],
        "seed": 5,
    }
    return InputProcessor(**options | changes)


def test_what_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest token, `</s>`, has 4 characters, so 20 tokens have at most 80 characters."""
    tokenized: list[str] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        tokenized.append(text)
        return [1] * 30

    monkeypatch.setattr(TOKENIZER, "encode", encode)
    with pytest.raises(
        RequestError, match=r"81 characters .* 20 tokens, the limit \(max_model_len\): .* 4 char"
    ):
        processor().process("r", "x" * 81, SamplingParams())
    assert tokenized == []
    with pytest.raises(RequestError, match="prompt has 30 tokens, but max_model_len is 20"):
        processor().process("r", "x" * 80, SamplingParams())
    for name in ("_PIECE_CHARS", "_TYPICAL_CHARS"):
        monkeypatch.setattr(length, name, 1)
    tokenized.clear()
    with pytest.raises(RequestError, match="prompt of 80 characters has more than 20 tokens"):
        processor().process("r", "x" * 80, SamplingParams())
    assert tokenized == ["x" * 20], "the first piece shows it"


def test_the_ends_of_a_text_need_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(
        TOKENIZER, "encode", lambda text, special: seen.append(len(text)) or encode(text, special)
    )
    text = "".join(chr(97 + i % 26) + " x" * (i % 3) for i in range(50_000))
    whole = encode(text, True)
    for keep in (1, 7, 100, 3000):
        seen.clear()
        assert length.last_tokens(TOKENIZER, text, keep, True) == whole[-keep:]
        assert length.first_tokens(TOKENIZER, text, keep, True) == whole[:keep]
        assert sum(seen) < 40 * (keep + 8)
    assert length.last_tokens(TOKENIZER, "ab", 5, True) == [257, 97, 98]
    assert length.first_tokens(TOKENIZER, "ab", 2, True) == [257, 97]
    spaces = " " * 100_000  # a token has few of them
    assert length.last_tokens(TOKENIZER, spaces, 50, False) == encode(spaces, False)[-50:]


@pytest.mark.parametrize(
    "prompt",
    [
        "ab",
        {"prompt": "ab"},
        {"prompt_token_ids": [257, 97, 98]},
        [257, 97, 98],
        (257, 97, 98),
        np.array([257, 97, 98]).tolist(),
    ],
)
def test_every_form_of_prompt(prompt: Any) -> None:
    (request,) = processor().process("r", prompt, SamplingParams())
    assert request.prompt == [257, 97, 98] and request.id == "r"
    assert all(type(i) is int for i in request.prompt)


def test_numpy_integers_become_integers() -> None:
    (request,) = processor().process("r", list(np.array([1, 2])), SamplingParams())
    assert [type(i) for i in request.prompt] == [int, int]


def test_text_of_a_chat_template_gets_no_second_begin_of_sequence() -> None:
    (request,) = processor().process("r", "<s>ab", SamplingParams(), add_special_tokens=False)
    assert request.prompt == [257, 97, 98]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "prompt is empty"),
        ({}, "must hold"),
        ({"prompt": 5}, "must hold"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list"),
        (5, "must be a string or a list"),
        (None, "must be a string or a list"),
        (b"ab", "must be a string or a list"),
        ([1, "a"], "must hold integers, got 'a'"),
        ([1, 2.0], "must hold integers, got 2.0"),
        ([1, True], "must hold integers, got True"),
        ([[1]], "must hold integers"),
        ([1, -1], "below the vocabulary size 300, got -1"),
        ([1, 300], "below the vocabulary size 300, got 300"),
        ([1] * 20, "prompt has 20 tokens, but max_model_len is 20"),
        ("x" * 30, "prompt has 31 tokens, but max_model_len is 20"),
    ],
)
def test_wrong_prompts(prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        processor().process("r", prompt, SamplingParams())
    assert refused.value.param == "prompt"
    assert refused.value.code == ("context_length_exceeded" if "max_model_len" in says else None)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"stop_token_ids": [300]}, "stop_token_ids .* 300"),
        ({"allowed_token_ids": [1, 999]}, "allowed_token_ids .* 999"),
        ({"logit_bias": {500: 1.0}}, "logit_bias .* 500"),
        ({"logprobs": 301}, "logprobs must not exceed"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"min_tokens": 18, "max_tokens": 18}, "min_tokens must be at most 17, got 18"),
    ],
)
def test_parameters_against_the_model(params: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        processor().process("r", [1, 2, 3], SamplingParams(**params))
    assert refused.value.param == next(iter(params))


def test_parameters_changed_after_they_were_made_are_checked_again() -> None:
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature"):
        processor().process("r", [1], params)
    with pytest.raises(RequestError, match="SamplingParams"):
        processor().process("r", [1], {"temperature": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("stop", 5, "stop must be a list, got 5"),
        ("stop_token_ids", 5, "stop_token_ids must be a list, got 5"),
        ("stop_token_ids", "12", "stop_token_ids must be a list, got '12'"),
        ("bad_words", 5, "bad_words must be a list, got 5"),
        ("logit_bias", [1], "logit_bias must map token ids to values, got [1]"),
    ],
)
def test_parameters_of_the_wrong_kind(field: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        SamplingParams(**{field: value})


def test_max_tokens_is_the_rest_of_the_context() -> None:
    for given, expected in ((None, 17), (1000, 17), (4, 4)):
        (request,) = processor().process("r", [1, 2, 3], SamplingParams(max_tokens=given))
        assert request.params.max_tokens == expected
    assert processor().process("r", [1] * 19, SamplingParams())[0].params.max_tokens == 1


def test_stop_ids() -> None:
    run = processor().process
    assert run("r", [1], SamplingParams())[0].stop_ids == [258]
    assert run("r", [1], SamplingParams(stop_token_ids=[4, 258]))[0].stop_ids == [258, 4]
    (request,) = run("r", [1], SamplingParams(ignore_eos=True, stop_token_ids=[4]))
    assert request.stop_ids == [4] and request.eos_ids == [258]


def test_bad_words_as_at_the_beginning_and_after_a_space() -> None:
    run = processor().process
    assert run("r", [1], SamplingParams(bad_words=["x"]))[0].bad_words_ids == [[120], [256]]
    assert run("r", [1], SamplingParams(bad_words=["yz"]))[0].bad_words_ids == [[121, 122]]
    assert run("r", [1], SamplingParams())[0].bad_words_ids == []


def test_n_answers_are_n_requests() -> None:
    params = SamplingParams(n=3, seed=10, prompt_logprobs=2)
    requests = processor().process("r", [1], params, priority=2, cache_salt="s")
    assert [r.id for r in requests] == ["r#0", "r#1", "r#2"] and [r.seed for r in requests] == [10, 11, 12]
    assert [r.params.n for r in requests] == [1, 1, 1] and params.n == 3
    assert [r.params.prompt_logprobs for r in requests] == [2, None, None]
    assert all((r.priority, r.cache_salt) == (2, "s") for r in requests)


def test_seeds_repeat_from_run_to_run_and_differ_between_requests() -> None:
    def seeds(engine_seed: int) -> list[int]:
        run = processor(seed=engine_seed).process
        return [r.seed for i in range(50) for r in run(str(i), [1], SamplingParams(n=4))]

    assert seeds(0) == seeds(0) and len({*seeds(0), *seeds(1)}) == 400
    assert all(0 <= s < 2**63 for s in seeds(0))
    largest = processor().process("r", [1], SamplingParams(n=2, seed=2**63 - 1))
    assert [r.seed for r in largest] == [2**63 - 1, -(2**63)]


def test_defaults_of_the_model_serve_requests_without_parameters() -> None:
    made = processor(defaults={"temperature": 0.6, "max_tokens": 7, "unknown": 1})
    (request,) = made.process("r", [1])
    assert (request.params.temperature, request.params.max_tokens) == (0.6, 7)
    assert made.process("r", [1], SamplingParams())[0].params.temperature == 1.0


def test_without_a_tokenizer_only_ids_pass() -> None:
    bare = processor(tokenizer=NoTokenizer())
    assert bare.process("r", [1, 2], SamplingParams())[0].prompt == [1, 2]
    for prompt, params in (("ab", {}), ([1], {"stop": ["x"]}), ([1], {"bad_words": ["x"]})):
        with pytest.raises(RequestError, match="tokenizer"):
            bare.process("r", prompt, SamplingParams(**params))


def test_a_model_without_a_head_gives_vectors_only() -> None:
    bare = processor(generates=False)
    with pytest.raises(RequestError, match="no head"):
        bare.process("r", [1, 2])
    assert bare.process("r", [1, 2], SamplingParams(max_tokens=1), pooling="mean")[0].pooling == "mean"
