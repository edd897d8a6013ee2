"""Structured output through `LLM`: answers follow the grammar for any weights, settings and concurrent requests."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.cli.main import main
from quire.grammar.compiler import CheckedGrammar
from quire.types import RequestError
from tiny import write_tiny

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
            },
            "required": ["n"],
            "additionalProperties": False,
        },
        "leaf": {"type": ["boolean", "null"]},
    },
    "$ref": "#/$defs/node",
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", 1.5, None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
}
UNION = {
    "oneOf": [
        {"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "boolean"}}, "required": ["k", "v"], "additionalProperties": False},
        {"type": "object", "properties": {"k": {"const": "b"}, "v": {"pattern": "^[xy]{2}$", "type": "string"}}, "required": ["k", "v"], "additionalProperties": False},
    ]
}  # fmt: skip
SCHEMAS = [TREE, PERSON, UNION]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), check_invariants=True) as llm:
        yield llm


def params(max_tokens: int = 200, temperature: float = 1.0, **given: Any) -> SamplingParams:
    fields = {name: given.pop(name) for name in ("n", "seed", "ignore_eos", "min_tokens", "logprobs", "bad_words", "stop", "allowed_token_ids") if name in given}  # fmt: skip
    structured = StructuredOutputsParams(**given)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, structured_outputs=structured, **fields)  # fmt: skip


def texts(llm: LLM, prompts: Any, asked: Any) -> list[str]:
    outs = llm.generate(prompts, asked, use_tqdm=False)
    assert all(answer.finish_reason == "stop" for out in outs for answer in out.outputs)
    return [answer.text for out in outs for answer in out.outputs]


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no overlap": {"overlap": False},
    "tight": {"block_size": 5, "max_num_seqs": 6, "max_model_len": 160, "blocks": 32},
    "chunked": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "recompute": {"kv_layout": "none"},
    "another process": {"engine_process": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_random_weights_write_valid_json(folder: Path, name: str) -> None:
    settings = dict(SETTINGS[name])
    if blocks := settings.pop("blocks", None):
        settings["kv_cache_memory"] = (
            blocks * 5 * 2 * 2 * 2 * 16 * 4
        )  # tokens, layers, k and v, heads, size, bytes
    asked = [
        params(120, json=schema, temperature=temperature, seed=seed, n=n)
        for schema in SCHEMAS
        for temperature, seed, n in ((0.0, None, 1), (1.0, 1, 3), (2.0, 2, 1))
    ]
    prompts = [f"prompt {i} " * (1 + i % 3) for i in range(len(asked))]
    free = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
    with LLM(str(folder), check_invariants=True, **settings) as llm:
        outs = llm.generate([*prompts, "free"], [*asked, free], use_tqdm=False)
        if blocks:
            assert llm.client.engine.log.totals.preemptions
    for out, given in zip(outs, asked):
        schema = given.structured_outputs.json
        for answer in out.outputs:
            assert answer.finish_reason == "stop", answer
            jsonschema.validate(
                json.loads(answer.text),
                schema,
                jsonschema.Draft202012Validator,
                format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
            )


def test_the_same_answers_in_any_company(llm: LLM, folder: Path) -> None:
    asked = [params(json=PERSON, seed=i) for i in range(6)]
    together = texts(llm, [f"p{i}" for i in range(6)], asked)
    assert together == [text for i in range(6) for text in texts(llm, f"p{i}", asked[i])]
    with LLM(str(folder), overlap=False) as other:
        assert texts(other, [f"p{i}" for i in range(6)], asked) == together


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": r"\d{3}-[a-f]{2,4}"}, r"\d{3}-[a-f]{2,4}"),
        ({"choice": ["yes", "no", 'a "quoted" one', "zwölf\n"]}, 'yes|no|a "quoted" one|zwölf\n'),
        ({"grammar": 'root ::= "(" [0-9]{2} ")" | "<" [a-c]{1,3} ">"'}, r"\([0-9]{2}\)|<[a-c]{1,3}>"),
        ({"grammar": 'start: "=" /[xyz]{4}/ j\nj: %json {"enum": [1, "b"]}\n'}, r'=[xyz]{4}(1|"b")'),
    ],
)
def test_other_forms(llm: LLM, given: dict[str, Any], pattern: str) -> None:
    for text in texts(llm, ["one", "two"], params(n=4, seed=3, **given)):
        assert re.fullmatch(pattern, text), text


def test_any_object(llm: LLM) -> None:
    out = llm.generate("x", params(json_object=True, seed=1, max_tokens=60, n=3), use_tqdm=False)[0]
    for answer in out.outputs:
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


def test_ends(llm: LLM) -> None:
    """ignore_eos continues while the grammar allows it; a complete answer ends despite min_tokens."""
    assert texts(llm, "x", params(regex="a{1,5}", ignore_eos=True)) == ["aaaaa"]
    assert texts(llm, "x", params(regex="a{1,5}", min_tokens=3, n=5, seed=0)) != ["a"] * 5
    assert all(len(text) >= 3 for text in texts(llm, "x", params(regex="a{1,5}", min_tokens=3, n=5, seed=0)))
    assert texts(llm, "x", params(regex="abc", min_tokens=50, ignore_eos=True)) == ["abc"]
    out = llm.generate("x", params(regex="a{9}", max_tokens=4), use_tqdm=False)[0].outputs[0]
    assert (out.text, out.finish_reason) == ("aaaa", "length")
    out = llm.generate("x", params(regex="a{9}", stop=["aaa"]), use_tqdm=False)[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("", "stop", "aaa")


def test_logprobs_are_of_the_model(llm: LLM) -> None:
    out = llm.generate("x", params(regex="abc", logprobs=1), use_tqdm=False)[0].outputs[0]
    assert len(out.logprobs) == len(out.token_ids) == 4 and out.cumulative_logprob < 0


def test_refusals(llm: LLM) -> None:
    for given, reason in (
        ({"json": {"not": {}}}, "Unsatisfiable schema: schema is false"),
        ({"json": {"contains": {"type": "integer"}}}, "the keyword 'contains' at # cannot be enforced"),
        ({"json": {"type": "integer", "multipleOf": 9999991}}, "takes more than 2 s to compile"),
        ({"regex": "(a"}, "unclosed group"),
    ):
        with pytest.raises(RequestError, match=re.escape(reason)):
            llm.generate("x", params(**given), use_tqdm=False)
    assert texts(llm, "x", params(regex="ok")) == ["ok"]
    engine = llm.client.engine
    assert (
        not engine.scheduler.requests and engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    )


def test_a_conflict_with_other_parameters_is_an_error(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=r"every token is excluded; check .*bad_words.* the structured output"
    ):
        llm.generate("x", params(regex="abc", bad_words=["b"]), use_tqdm=False)


def test_needs_a_tokenizer(folder: Path) -> None:
    with (
        LLM(str(folder), skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match="tokenizer"),
    ):
        llm.generate([[1, 2]], params(regex="a"), use_tqdm=False)


def test_leaving_while_a_grammar_is_compiled(llm: LLM) -> None:
    slow = params(json={"type": "integer", "multipleOf": 9999991})
    llm._submit(["x"], [slow], None)
    llm.client.abort(list(llm.client.engine.scheduler.requests))
    begin = time.monotonic()
    assert texts(llm, "x", params(regex="quick")) == ["quick"]
    assert time.monotonic() - begin < 30


def test_nothing_starts_without_need(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)
        assert not llm.client.engine.grammar.started


# ---------------------------------------------------------------------------------- the demo model


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "person.json"
    schema.write_text(json.dumps({**PERSON, "required": ["name", "born"]}))
    code = main(
        ["generate", "--model", "demo", "--json-schema", str(schema), "--temperature", "0", "--chat", "Who are you?"]
    )  # fmt: skip
    assert code == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), json.loads(schema.read_text()))


def test_flags_that_cannot_work(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for args, reason in (
        (["--json-schema", "/no/such/file"], "/no/such/file"),
        (
            ["--json-schema", '{"contains": {"type": "integer"}}'],
            "the keyword 'contains' at # cannot be enforced",
        ),
        (["--regex", "["], "regex cannot be enforced"),
    ):
        assert main(["generate", "--model", str(folder), *args, "x"]) != 0
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "--regex", "a", "--json-object", "x"])


def test_a_grammar_that_is_too_slow_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = params(regex="[a-z]{20}", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr("quire.grammar.answer.MASK_LIMIT_S", 0.0)
        with pytest.raises(
            RequestError, match="the answer cannot continue: its grammar is too slow: one mask took"
        ):
            llm.generate("x", asked, use_tqdm=False)
    assert len(texts(llm, "x", asked)[0]) == 20


def test_an_answer_goes_on_in_a_new_lexer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer that runs out of states is replaced without a change of the answer."""
    asked = params(regex="[a-z]{90}", seed=1)
    want, built, build = texts(llm, "x", asked), [], CheckedGrammar.matcher

    def count(grammar: CheckedGrammar, max_lexer_states: int) -> Any:
        built.append(max_lexer_states)
        return build(grammar, max_lexer_states)

    monkeypatch.setattr(CheckedGrammar, "matcher", count)
    monkeypatch.setattr("quire.grammar.matching.LEXER_STATES", 40)
    assert texts(llm, "x", asked) == want and len(built) > 1
