"""Grammars in the step loop: the real engine and matchers over the fake device of test_scheduler, under random loads,
against decoding one request after the other."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from test_scheduler import (
    EOS,
    VOCAB,
    ChangingDepth,
    FakeDevice,
    Handle,
    chain,
    continuous,
    drain,
    make_engine,
    pick,
    random_requests,
    sampled_tokens,
)

from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.frontend.structured_spec import grammar_spec
from quire.grammar import compiler as compiler_module
from quire.grammar import matching
from quire.grammar.answer import GrammarAnswer
from quire.grammar.checker_process import Verdict
from quire.grammar.compiler import CheckedGrammar, Compiler
from quire.grammar.library import LibraryGrammar
from quire.grammar.mask_threads import MaskThreads
from quire.grammar.matching import BYTES, Vocabulary, build_matcher, grammar_text
from quire.types import (
    EngineOutput,
    EngineRequest,
    GrammarSpec,
    RequestError,
    SamplingParams,
    StepPlan,
    StepResult,
    StructuredOutputsParams,
    TokenMasks,
)

TOKENS = [
    b"",
    b"a",
    b"b",
    b"c",
    b"ab",
    b"bc",
    b"1",
    b"12",
    b"2",
    b'"',
    b"{",
    b"}",
    b'{"',
    b'"}',
    b":",
    b'":',
    b" ",
]
TOKENS += [b"d", b"e", b"cab", b"", b"xx", b"-"]
STOP = 3
SPECS = [
    GrammarSpec("regex", "a+b?"),
    GrammarSpec("regex", "(a|bc)*1{0,9}"),
    GrammarSpec("regex", "a{3,5}"),
    GrammarSpec("choice", '["abc", "ab", "cab1"]'),
    GrammarSpec("grammar", 'root ::= "a" root "b" | "c" root | "1"'),
    GrammarSpec(
        "json", '{"type":"object","properties":{"a":{"enum":[1,2,12]}},"additionalProperties":false}'
    ),
    GrammarSpec("regex", "["),  # refused
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    assert len(TOKENS) == VOCAB
    return Vocabulary(TOKENS)


class Source:
    """A stand-in for the helper process that is sometimes slow, and does not answer while its gate is shut."""

    def __init__(self, delay_s: float = 0.0, shut: bool = False) -> None:
        self.delay_s = delay_s
        self.gate = threading.Event()
        if not shut:
            self.gate.set()
        self.checked: list[GrammarSpec] = []
        self.memory_bytes = 1 << 20

    def tokens(self) -> list[bytes]:
        return TOKENS

    def check(self, spec: GrammarSpec) -> Verdict:
        self.checked.append(spec)
        time.sleep(self.delay_s)
        assert self.gate.wait(60)
        return Verdict(0, grammar_text(spec), self.memory_bytes)

    def close(self) -> None:
        pass


@dataclass
class MaskedDevice(FakeDevice):
    """A sampler that picks among the tokens that a mask allows."""

    masks: dict[int, TokenMasks | None] = field(default_factory=dict)
    masked_rows: int = 0

    def sample(self, step: int, masks: TokenMasks | None) -> Handle:
        self.masks[step] = masks
        return super().sample(step, masks)

    def _sample(self, plan: StepPlan) -> StepResult:
        masks, hidden, out = self.masks.pop(plan.step), self.hidden.pop(plan.step), []
        allowed = {}
        if masks is not None:
            assert masks.bits.dtype == np.int32 and masks.bits.shape == (len(masks.rows), -(-VOCAB // 32))
            assert plan.per_logit_row(plan.samples)[masks.rows].all(), "a mask for a row that does not sample"
            bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
            allowed = dict(zip(masks.rows.tolist(), bits))
            self.masked_rows += len(allowed)
        for row, (slot, n) in enumerate(zip(plan.slots.tolist(), plan.num_tokens.tolist())):
            column, first = self.columns[slot], int(plan.first_logit_rows[row])
            column["computed"] += n
            if plan.samples[row]:
                tokens, drafts = [], column.pop("drafts")
                for offset, state in enumerate(hidden[slot]):
                    tokens.append(choose(state, allowed.get(first + offset)))
                    if drafts[offset : offset + 1] != tokens[-1:]:
                        break
                column["computed"] -= 1 + len(drafts) - len(tokens)
                column["tokens"] += tokens
                out.append(tokens)
                if not self.keeps_kv:
                    column["computed"] = 0
        return StepResult(plan.step, sampled_tokens(out))

    def _draft(self, column: dict, count: int) -> list[int]:
        """Guess the next tokens: any token, or one that grammars often allow."""
        return [self.drafter.choice([1, 2, 6, self.drafter.randrange(VOCAB)]) for _ in range(count)]


def choose(h: int, allowed: np.ndarray | None) -> int:
    if allowed is None:
        return pick(h)
    tokens = np.flatnonzero(allowed)
    return int(tokens[h // 7 % len(tokens)]) if len(tokens) else 0


def reference(request: EngineRequest, max_model_len: int, vocabulary: Vocabulary) -> tuple[list[int], str]:
    """Return the tokens and finish reason of a request that runs alone, by a second implementation of the end rules."""
    assert request.grammar is not None
    try:
        matcher = build_matcher(vocabulary, request.grammar, grammar_text(request.grammar))
    except RequestError:
        return [], "error"
    h, out = -1, []
    for token in request.prompt:
        h = chain(h, token)
    limit = min(request.params.max_tokens or 1 << 30, max_model_len - len(request.prompt))
    while True:
        mask = matcher.compute_bitmask()
        allowed = {i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1} - {EOS}
        may_end = bool(mask[VOCAB // 8] >> VOCAB % 8 & 1)
        early = len(out) < request.params.min_tokens
        if early:
            allowed = allowed - set(request.stop_ids) or allowed
        if may_end and not ((request.params.ignore_eos or early) and allowed):
            allowed = allowed | {EOS}
        out.append(choose(h, np.array([i in allowed for i in range(VOCAB)])))
        h = chain(h, out[-1])
        if out[-1] == EOS or out[-1] in request.stop_ids:
            return out, "stop"
        assert matcher.consume_token(out[-1])
        if len(out) == limit:
            return out, "length"


def constrained(rng: random.Random, max_len: int) -> Iterator[EngineRequest]:
    for request in random_requests(rng, max_len):
        request.stop_ids, request.eos_ids = [EOS], [EOS]
        if rng.random() < 0.7:
            request.grammar = rng.choice(SPECS)
            request.params.ignore_eos = rng.random() < 0.3
            if rng.random() < 0.2:
                request.stop_ids = [EOS, STOP]
        yield request


def with_grammar(engine: Engine, source: Source, patience_s: float = 10.0) -> LibraryGrammar:
    device = engine.executor
    engine.executor = MaskedDevice(device.block_size, device.keeps_kv, device.groups)
    engine.grammar = LibraryGrammar(Compiler(source), VOCAB, patience_s)
    return engine.grammar


# Blocks for little more than one request, and many at once, so that about every second such load preempts.
TIGHT = dict(
    max_len=24, layout="paged", block_size=1, num_blocks=26, rows=8, admits=continuous, windows=(None,)
)


def random_run(seed: int, vocabulary: Vocabulary) -> Engine:
    """Run a random load. With seeds divisible by five every mask is late, so every row leaves its step once."""
    rng = random.Random(seed)
    engine, max_len = make_engine(rng, **(TIGHT if seed % 2 else {}), snapshots=None)
    grammar = with_grammar(engine, Source(rng.choice([0.0, 0.0, 0.001])), 10.0 if seed % 5 else 0.0)
    if engine.scheduler.limits.keeps_kv:
        engine.scheduler.depth = ChangingDepth(seed)
    todo, constrained_accepted = list(constrained(rng, max_len)), 0
    added: dict[str, EngineRequest] = {}
    got: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    while todo or engine.has_work:
        while todo and rng.random() < 0.7:
            request = todo.pop()
            engine.add(request)
            added[request.id], got[request.id] = request, []
        if rng.random() < 0.02 and (live := [i for i in added if i not in ended]):
            engine.abort(rng.choice(live))
        for output in engine.step():
            assert output.id not in ended, "an output after the final one"
            got[output.id] += output.token_ids
            constrained_accepted += max(0, len(output.token_ids) - 1) * (added[output.id].grammar is not None)
            if output.finish_reason:
                ended[output.id] = output.finish_reason
    assert set(ended) == set(added)
    engine.constrained_accepted = constrained_accepted
    for name, request in added.items():
        if request.grammar is None:
            continue
        want, reason = reference(request, max_len, vocabulary)
        if ended[name] == "abort":
            assert got[name] == want[: len(got[name])]
        else:
            assert (got[name], ended[name]) == (want, reason), (seed, name, request.grammar)
    assert grammar.idle
    engine.close()
    return engine


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_loads_agree_with_sequential_decoding(start: int, vocabulary: Vocabulary) -> None:
    preempted = masked = accepted = 0
    for seed in range(start, start + 100):
        engine = random_run(seed, vocabulary)
        preempted += engine.log.totals.preemptions
        masked += engine.executor.masked_rows
        accepted += engine.constrained_accepted
    assert preempted > 10 and masked > 500 and accepted  # how many drafts depends on the time of masks


SMALL = dict(max_len=40, layout="paged", block_size=4, num_blocks=30, chunk=True, budget=64, rows=8)


def small(depth: int = 2, source: Source | None = None) -> Engine:
    engine, _ = make_engine(random.Random(0), **SMALL, depth=depth)
    with_grammar(engine, source or Source())
    return engine


def ask(name: str, spec: GrammarSpec | None, max_tokens: int = 9, **more) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **more)
    return EngineRequest(name, [5, 6, 7], params, [EOS], [EOS], grammar=spec)


def text(tokens: list[int]) -> bytes:
    return b"".join(TOKENS[t] for t in tokens)


def test_others_run_while_a_grammar_is_compiled() -> None:
    source = Source(shut=True)
    engine = small(source=source)
    engine.add(ask("held", SPECS[2]))
    engine.add(ask("free", None, 20, ignore_eos=True))
    assert not engine.step() and engine.log.last.rows[0][0] == "free"
    assert engine.log.last.wait_reason == "grammar"
    source.gate.set()
    got = drain(engine)
    assert text(got["held"]) in (b"aaa", b"aaaa", b"aaaaa")


def test_nothing_spins_while_only_a_grammar_is_awaited() -> None:
    engine = small(source=Source(delay_s=0.2))
    engine.add(ask("held", SPECS[2]))
    steps, began_s = 0, time.monotonic()
    while not engine.scheduler.running:
        engine.step()
        steps += 1
    assert steps < 10 + (time.monotonic() - began_s) / 0.001, "each waits two milliseconds"


def test_the_same_spec_is_compiled_once() -> None:
    source = Source(delay_s=0.02)
    engine = small(source=source)
    for i in range(5):
        engine.add(ask(f"r{i}", SPECS[0]))
    drain(engine)
    engine.add(ask("later", SPECS[0]))
    drain(engine)
    assert source.checked == [SPECS[0]]


def test_a_refused_grammar_ends_its_request_alone() -> None:
    engine = small()
    engine.add(ask("bad", GrammarSpec("regex", "(")))
    engine.add(ask("good", SPECS[2]))
    errors, got = {}, {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.id, []).extend(output.token_ids)
            if output.finish_reason == "error":
                errors[output.id] = output.error.message
    assert list(errors) == ["bad"] and "unclosed group" in errors["bad"] and got["bad"] == []
    assert set(text(got["good"])) == {ord("a")}


def test_abort_while_held() -> None:
    source = Source(shut=True)
    engine = small(source=source)
    engine.add(ask("r", SPECS[0]))
    engine.step()
    engine.abort("r")
    assert [(o.id, o.finish_reason) for o in engine.step()] == [("r", "abort")]
    assert not engine.has_work
    source.gate.set()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_outside_the_grammar_is_never_handed_out(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler falls back to some token if allowed_token_ids exclude everything that the grammar allows."""
    monkeypatch.setattr(sys.modules[__name__], "choose", lambda h, allowed: 9)
    engine = small(depth)
    engine.add(ask("r", SPECS[0]))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [(o.token_ids, o.finish_reason) for o in outputs][-1] == ([], "error")
    assert not any(o.token_ids for o in outputs) and "no token satisfies" in outputs[-1].error.message


def test_an_engine_without_grammars_refuses() -> None:
    engine = small()
    engine.grammar = NoGrammar()
    engine.add(ask("r", SPECS[0]))
    (output,) = engine.step()
    assert output.finish_reason == "error" and "tokenizer" in output.error.message


def test_one_clients_specs_do_not_hold_up_another() -> None:
    gate = threading.Event()

    class Slow(Source):
        def check(self, spec: GrammarSpec) -> Verdict:
            if spec.text.startswith("slow"):
                gate.wait(20)
            return super().check(spec)

    compiler = Compiler(Slow())
    slow = [compiler.submit(GrammarSpec("regex", f"slow{i}"), "alpha") for i in range(40)]
    shared = GrammarSpec("regex", "a{3}")
    queued = compiler.submit(shared, "alpha")
    assert compiler.submit(GrammarSpec("regex", "b"), "beta").result(10)
    assert compiler.submit(shared, "beta").result(10)  # though it waits in alpha's line, too
    assert queued.done() and not any(future.done() for future in slow)
    gate.set()
    for future in slow:
        future.result(10)
    assert not compiler.num_queued
    compiler.close()


def test_the_cache_is_bounded() -> None:
    source = Source()
    compiler = Compiler(source)

    def get(i: int) -> None:
        compiler.submit(GrammarSpec("regex", f"a{{{i}}}")).result(10)

    for i in range(300):
        get(i)
    get(299)
    assert len(source.checked) == 300
    get(0)
    assert len(source.checked) == 301
    compiler.close()


def test_large_specs_leave_the_cache_before_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_CACHED_CHARS", 10_000)
    source = Source()
    compiler = Compiler(source)
    specs = [GrammarSpec("regex", f"a{{{i}}}(" + "b" * 3000 + ")?") for i in range(5)]
    for spec in specs:
        compiler.submit(spec).result(10)
    compiler.submit(specs[-1]).result(10)
    assert len(source.checked) == 5, "the newest are kept"
    compiler.submit(specs[0]).result(10)
    assert len(source.checked) == 6, "10,000 characters hold three specs"
    compiler.close()


@pytest.mark.parametrize(
    "texts",
    [["a", "ab"], ['"q"', "back\\slash", "new\nline"], ["é😀", "\0\x7f", "/re.*/", "// c"], ["", "a"]],
)
def test_choices_are_taken_literally(texts: list[str], vocabulary: Vocabulary) -> None:
    spec = GrammarSpec("choice", json.dumps(texts))
    bytes_only = Vocabulary(BYTES)
    matcher = build_matcher(bytes_only, spec, grammar_text(spec))
    for text in [*texts, "zz", "a" * 3]:
        copy, tokens = matcher.deep_copy(), list(text.encode())
        accepted = copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()
        assert accepted == (text in texts), text


def test_a_fault_of_the_compiler_is_not_remembered() -> None:
    source = Source()
    engine = small(source=source)
    check, source.check = source.check, lambda spec: 1 // 0
    engine.add(ask("r", SPECS[0]))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [o.finish_reason for o in outputs] == ["error"] and "ZeroDivisionError" in outputs[0].error.message
    source.check = check
    engine.add(ask("again", SPECS[0]))
    assert text(drain(engine)["again"]).startswith(b"a")


@pytest.mark.parametrize(
    ("regex", "taken", "refused"),
    [
        (r"\d", "07", "\u0967\u07c0a"),
        (r"\D", "a\u0967", "0"),
        (r"\w", "aZ_9", "\u00e9-"),
        (r"[^\W_]", "aZ9", "_\u00e9-"),
        (r"[\d\w-]", "0a-", "\u0967+"),
        (r"\s", " \n\u00a0\ufeff", "\u0085a"),
        (r"[^\S\n]", " \t", "\na"),
        (r"\\d", "", "0"),  # a backslash and the letter
    ],
)
def test_classes_are_those_of_ecmascript(regex: str, taken: str, refused: str) -> None:
    """In patterns of JSON schemas and in regular expressions alike."""
    bytes_only = Vocabulary(BYTES)
    for text in taken + refused:
        for json_schema in (False, True):
            params = (
                StructuredOutputsParams(json={"type": "string", "pattern": f"^{regex}$"})
                if json_schema
                else StructuredOutputsParams(regex=regex)
            )
            spec = grammar_spec(params)
            matcher = build_matcher(bytes_only, spec, grammar_text(spec))
            written = json.dumps(text, ensure_ascii=False) if json_schema else text
            count = matcher.try_consume_tokens(list(written.encode()))
            whole = count == len(written.encode()) and matcher.is_accepting()
            assert whole == (text in taken), (text, json_schema)


def test_patterns_of_properties_stay_apart() -> None:
    """Two patterns with the same meaning must both be enforced."""
    schema = {"patternProperties": {r"^\d$": {"minimum": 1}, "^[0-9]$": {"maximum": 5}}}
    found = json.loads(grammar_spec(StructuredOutputsParams(json=schema)).text)["patternProperties"]
    assert list(found.values()) == [{"minimum": 1}, {"maximum": 5}]


# ------------------------------------------------------------------------ budgets, and answers that share nothing

WORDS = r"^(\w{1,30}[ .,]?){1,200}$"
TEXT = "the little girl named Lily went to the park and saw a big red ball "


@pytest.fixture(scope="module")
def byte_vocabulary() -> Vocabulary:
    return Vocabulary([*BYTES, *(word.encode() for word in TEXT.split())])


def answer_to(vocabulary: Vocabulary, spec: GrammarSpec, **params: Any) -> GrammarAnswer:
    grammar = CheckedGrammar(spec, grammar_text(spec), 0, vocabulary)
    request = EngineRequest("r", [1], SamplingParams(**params), [END], [END], grammar=spec)
    return GrammarAnswer(request, grammar, vocabulary.end)


END = 0  # the byte of this number is in no text here


def allows(answer: GrammarAnswer, token: int) -> bool:
    return answer.ready is not None and bool(answer.ready[token >> 5] >> np.uint32(token & 31) & 1)


def write(answer: GrammarAnswer, text: bytes, every: int = 1) -> None:
    """Write a text byte by byte, with a mask before every `every` bytes."""
    for i in range(0, len(text), every):
        answer.work()
        assert answer.error is None, (i, answer.error)
        part = list(text[i : i + every])
        assert allows(answer, part[0]), (i, text[i : i + 9])
        answer.use()
        assert answer.accepts(EngineOutput("r", part[:1]))
        answer.tokens += part[1:]
    answer.work()
    assert answer.error is None, answer.error


def json_spec(schema: Any) -> GrammarSpec:
    return grammar_spec(StructuredOutputsParams(json=schema))


def prose(length: int) -> str:
    return (TEXT * (length // len(TEXT) + 1))[:length]


def test_a_long_string_is_written_to_its_last_character(byte_vocabulary: Vocabulary) -> None:
    """The text has twice as many characters as a lexer may have states."""
    answer = answer_to(byte_vocabulary, json_spec({"type": "string", "maxLength": 100_000}))
    write(answer, b'"' + prose(100_000).encode(), every=40)
    assert allows(answer, ord('"')) and not allows(answer, ord("a")) and not allows(answer, END)
    answer.use()
    assert answer.accepts(EngineOutput("r", [ord('"')]))
    answer.work()
    assert allows(answer, END) and not allows(answer, ord('"'))


def test_twenty_fields_of_a_thousand_characters(byte_vocabulary: Vocabulary) -> None:
    fields = {f"f{i}": {"type": "string", "maxLength": 1000} for i in range(20)}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    answer = answer_to(byte_vocabulary, json_spec(schema))
    write(answer, json.dumps({name: prose(1000) for name in fields}).encode(), every=20)
    assert allows(answer, END)


def test_many_words_are_written_to_their_end(byte_vocabulary: Vocabulary) -> None:
    text = " ".join((TEXT * 20).split()[:200])
    for spec, written in (
        (grammar_spec(StructuredOutputsParams(regex=WORDS.strip("^$"))), text),
        (json_spec({"type": "string", "pattern": WORDS}), f'"{text}"'),
    ):
        answer = answer_to(byte_vocabulary, spec)
        write(answer, written.encode(), every=7)
        assert allows(answer, END)


def test_an_answer_that_exhausts_its_lexer_ends_with_an_error(
    byte_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed answer does not count as complete, and the next one with this spec starts with a new matcher."""
    monkeypatch.setattr(
        CheckedGrammar, "matcher", lambda g, n: build_matcher(g.vocabulary, g.spec, g.text, 60)
    )
    spec = GrammarSpec("regex", "a{0,500}")  # complete at every place
    for _ in range(2):
        answer, written = answer_to(byte_vocabulary, spec), 0
        while answer.error is None and written < 500:
            answer.work()
            if answer.error is None:
                answer.use()
                assert answer.accepts(EngineOutput("r", [97]))
                written += 1
        assert written > 20 and "too many states" in (answer.error or "") and answer.ready is None


def test_answers_share_no_lexer(vocabulary: Vocabulary) -> None:
    spec = GrammarSpec("regex", "a{0,500}")
    grammar = CheckedGrammar(spec, grammar_text(spec), 0, vocabulary)
    first, second = grammar.matcher(60), grammar.matcher(60)
    for _ in range(400):
        first.compute_bitmask()
        first.consume_token(1)
    assert first.is_error()
    mask = second.compute_bitmask()
    assert not second.is_error() and mask[0] & 2


def spend(answer: GrammarAnswer, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one mask take this long."""
    times = iter([0.0, seconds])
    with monkeypatch.context() as patch:
        patch.setattr("quire.grammar.answer.time.thread_time", lambda: next(times))
        answer.work()


@pytest.mark.parametrize(
    ("masks_s", "says"), [([0.3], "one mask took 300 ms"), ([0.16] * 15, "15 tokens took 2400 ms")]
)
def test_an_answer_has_a_time_budget(
    byte_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, masks_s: list[float], says: str
) -> None:
    answer = answer_to(byte_vocabulary, GrammarSpec("regex", "a*"))
    answer.work()
    for took_s in masks_s:
        assert answer.error is None
        answer.use()
        assert answer.accepts(EngineOutput("r", [97]))
        spend(answer, took_s, monkeypatch)
    assert answer.error is not None and "too slow" in answer.error and says in answer.error


def test_slow_answers_are_computed_in_the_background_until_they_are_quick(
    byte_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, found = answer_to(byte_vocabulary, GrammarSpec("regex", "a*")), []
    answer.work()
    for took_s in (0.0, 0.02, *[0.0] * 17):
        answer.use()
        assert answer.accepts(EngineOutput("r", [97]))
        spend(answer, took_s, monkeypatch)
        assert allows(answer, 97)
        found.append(answer.slow)
    assert found == [False, *[True] * 16, False, False]


def test_a_step_does_not_wait_for_a_slow_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests get tokens meanwhile, and the slow request gets the same tokens as when it runs alone."""
    gate, begun = threading.Event(), threading.Event()
    work = GrammarAnswer.work

    def slow(answer: GrammarAnswer) -> None:
        if answer.request_id == "slow" and len(answer.tokens) == 2 and not begun.is_set():
            begun.set()
            assert gate.wait(60)
        work(answer)

    alone = small()
    alone.add(ask("slow", SPECS[2]))
    want = drain(alone)["slow"]
    monkeypatch.setattr(GrammarAnswer, "work", slow)
    engine, _ = make_engine(random.Random(0), **SMALL, depth=2)
    with_grammar(engine, Source(), patience_s=0.01)
    engine.add(ask("slow", SPECS[2]))
    got: dict[str, list[int]] = {"slow": [], "other": [], "free": []}
    while not begun.is_set():
        for output in engine.step():
            got[output.id] += output.token_ids
    engine.add(ask("other", GrammarSpec("regex", "(a|b){99}"), 30))
    engine.add(ask("free", None, 30, ignore_eos=True))
    ended = set()
    while engine.has_work:
        for output in engine.step():
            got[output.id] += output.token_ids
            ended |= {output.id} if output.finish_reason else set()
        if not gate.is_set() and ended >= {"other", "free"}:
            assert len(got["slow"]) == 2
            gate.set()
    assert got["slow"] == want and len(got["other"]) == 30
    engine.close()


@pytest.mark.parametrize(("cores", "stuck_masks"), [(2, 2), (16, 12)])
def test_more_stuck_masks_than_threads_delay_nobody(
    cores: int, stuck_masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one thread per two cores, and up to one replacement per core for stuck threads."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    gate = threading.Event()
    stuck = [threading.Event() for _ in range(stuck_masks)]

    class Stuck:
        def __init__(self, event: threading.Event) -> None:
            self.event = event

        def work(self) -> None:
            self.event.set()
            assert gate.wait(60)

    class Quick:
        done = False

        def work(self) -> None:
            self.done = True

    threads, quick = MaskThreads(threading.Event(), 0.05), Quick()
    jobs = [Stuck(event) for event in stuck]
    late = threads.run([*jobs, quick])
    assert set(jobs) <= set(late)
    deadline = time.monotonic() + 30
    while not quick.done and time.monotonic() < deadline:
        threads.finished()
        time.sleep(0.005)
    assert quick.done and all(event.is_set() for event in stuck)
    gate.set()
    found: list[Any] = []
    while len(found) < len(jobs) and time.monotonic() < deadline:
        found += [job for job in threads.finished() if isinstance(job, Stuck)]
    assert set(found) == set(jobs)
    threads.close()


def test_memory_of_matchers_is_bounded() -> None:
    """An answer whose matcher does not fit into the memory limit starts when another one has ended."""
    source = Source()
    source.memory_bytes = 700 << 20
    engine = small(source=source)
    for name in "ab":
        engine.add(ask(name, SPECS[2]))
    together, got = 0, {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.id, []).extend(output.token_ids)
        together = max(together, engine.grammar.num_answers)
    assert together == 1 and set(got) == {"a", "b"} and all(got.values())


def test_the_end_is_not_what_the_grammar_writes_with_the_same_token(vocabulary: Vocabulary) -> None:
    """Tokens 6 and 38 are both "1" and have the same bit in two words of the mask; 38 ends the answer."""
    tokens = [*TOKENS, *[b""] * 9, *TOKENS]
    spec = GrammarSpec("regex", "1{3}")
    grammar = CheckedGrammar(spec, grammar_text(spec), 0, Vocabulary(tokens))
    assert tokens[6] == tokens[38] == b"1"
    answer = GrammarAnswer(
        EngineRequest("r", [1], SamplingParams(), [38], [38], grammar=spec), grammar, len(tokens)
    )
    answer.work()
    assert allows(answer, 6) and not allows(answer, 38)
    for _ in range(3):
        answer.use()
        assert answer.accepts(EngineOutput("r", [6]))
        answer.work()
    assert allows(answer, 38) and not allows(answer, 6)


def test_consuming_slowly_releases_the_gil(byte_vocabulary: Vocabulary) -> None:
    spec = GrammarSpec("regex", "ab")
    matcher = build_matcher(byte_vocabulary, spec, grammar_text(spec))
    consumer = matching.DetachedConsumer(byte_vocabulary)
    assert consumer.consume(matcher, ord("a")) and not consumer.consume(matcher, ord("a"))
    assert matcher.is_error()
