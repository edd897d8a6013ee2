"""Grammars in the step loop: the real engine and matchers over the fake device of test_scheduler, under random loads,
against decoding one request after the other."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from test_scheduler import (
    EOS,
    VOCAB,
    FakeDevice,
    Handle,
    chain,
    continuous,
    drain,
    make_engine,
    pick,
    random_requests,
)

from quire.core.engine import Engine
from quire.core.grammar import NoGrammar
from quire.frontend.structured import grammar_spec
from quire.grammar.checker_process import Verdict
from quire.grammar.compiler import Compiler
from quire.grammar.library import LibraryGrammar
from quire.grammar.matching import BYTES, Vocabulary, compiled, grammar_text
from quire.types import (
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
    """In the place of the helper process; sometimes slow, and silent while its gate is shut."""

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
    """Picks among the tokens that a mask allows."""

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
            assert plan.samples[masks.rows].all(), "a mask for a row that does not sample"
            bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
            allowed = dict(zip(masks.rows.tolist(), bits))
            self.masked_rows += len(allowed)
        for row, (slot, n) in enumerate(zip(plan.slots.tolist(), plan.num_tokens.tolist())):
            column = self.columns[slot]
            column["computed"] += n
            if plan.samples[row]:
                token = choose(hidden[slot], allowed.get(row))
                column["tokens"].append(token)
                out.append([token])
                if not self.keeps_kv:
                    column["computed"] = 0
        return StepResult(plan.step, out)


def choose(h: int, allowed: np.ndarray | None) -> int:
    if allowed is None:
        return pick(h)
    tokens = np.flatnonzero(allowed)
    return int(tokens[h // 7 % len(tokens)]) if len(tokens) else 0


def reference(request: EngineRequest, max_model_len: int, vocabulary: Vocabulary) -> tuple[list[int], str]:
    """Tokens and finish reason, one request alone, the rules for the end written once more."""
    assert request.grammar is not None
    try:
        matcher = compiled(vocabulary, request.grammar, grammar_text(request.grammar))
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


def with_grammar(engine: Engine, source: Source) -> LibraryGrammar:
    device = engine.executor
    engine.executor = MaskedDevice(device.block_size, device.keeps_kv)
    engine.grammar = LibraryGrammar(Compiler(source), VOCAB)
    return engine.grammar


# Pages for little more than one request, and many at once, so that about every second such load preempts.
TIGHT = dict(max_len=24, layout="paged", block_size=1, num_blocks=26, rows=8, admits=continuous)


def random_run(seed: int, vocabulary: Vocabulary) -> Engine:
    rng = random.Random(seed)
    engine, max_len = make_engine(rng, **(TIGHT if seed % 2 else {}))
    grammar = with_grammar(engine, Source(rng.choice([0.0, 0.0, 0.001])))
    todo = list(constrained(rng, max_len))
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
            if output.finish_reason:
                ended[output.id] = output.finish_reason
    assert set(ended) == set(added)
    for name, request in added.items():
        if request.grammar is None:
            continue
        want, reason = reference(request, max_len, vocabulary)
        if ended[name] == "abort":
            assert got[name] == want[: len(got[name])]
        else:
            assert (got[name], ended[name]) == (want, reason), (seed, name, request.grammar)
    assert not grammar._states and not grammar._waiting and not grammar._by_slot
    engine.close()
    return engine


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_loads_agree_with_sequential_decoding(start: int, vocabulary: Vocabulary) -> None:
    preempted = masked = 0
    for seed in range(start, start + 100):
        engine = random_run(seed, vocabulary)
        preempted += engine.log.totals.preemptions
        masked += engine.executor.masked_rows
    assert preempted > 10 and masked > 500


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
    assert engine.step() == [] and engine.log.last.rows[0][0] == "free"
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
                errors[output.id] = output.error
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
    """As after allowed_token_ids that exclude all that the grammar allows: the sampler falls back to some token."""
    monkeypatch.setattr(sys.modules[__name__], "choose", lambda h, allowed: 9)
    engine = small(depth)
    engine.add(ask("r", SPECS[0]))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [(o.token_ids, o.finish_reason) for o in outputs][-1] == ([], "error")
    assert not any(o.token_ids for o in outputs) and "no token satisfies" in outputs[-1].error


def test_an_engine_without_grammars_refuses() -> None:
    engine = small()
    engine.grammar = NoGrammar()
    engine.add(ask("r", SPECS[0]))
    (output,) = engine.step()
    assert output.finish_reason == "error" and "tokenizer" in output.error


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
    assert not compiler._jobs._lines
    compiler.close()


def test_the_cache_is_bounded_in_memory_and_number() -> None:
    source = Source()
    compiler = Compiler(source)

    def get(i: int) -> None:
        compiler.submit(GrammarSpec("regex", f"a{{{i}}}")).result(10)

    for i in range(300):
        get(i)
    assert len(compiler._cache) == len(compiler._bytes) == 256
    get(299)
    assert len(source.checked) == 300
    get(0)
    assert len(source.checked) == 301
    source.memory_bytes = 200 << 20
    for i in range(300, 304):
        get(i)
    assert len(compiler._cache) == 2 and sum(compiler._bytes.values()) == 400 << 20
    compiler.close()


@pytest.mark.parametrize(
    "texts",
    [["a", "ab"], ['"q"', "back\\slash", "new\nline"], ["é😀", "\0\x7f", "/re.*/", "// c"], ["", "a"]],
)
def test_choices_are_taken_literally(texts: list[str], vocabulary: Vocabulary) -> None:
    spec = GrammarSpec("choice", json.dumps(texts))
    bytes_only = Vocabulary(BYTES)
    matcher = compiled(bytes_only, spec, grammar_text(spec))
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
    assert [o.finish_reason for o in outputs] == ["error"] and "ZeroDivisionError" in outputs[0].error
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
            matcher = compiled(bytes_only, spec, grammar_text(spec))
            written = json.dumps(text, ensure_ascii=False) if json_schema else text
            count = matcher.try_consume_tokens(list(written.encode()))
            whole = count == len(written.encode()) and matcher.is_accepting()
            assert whole == (text in taken), (text, json_schema)


def test_patterns_of_properties_stay_apart() -> None:
    """Two that mean the same are two still, since both bind."""
    schema = {"patternProperties": {r"^\d$": {"minimum": 1}, "^[0-9]$": {"maximum": 5}}}
    found = json.loads(grammar_spec(StructuredOutputsParams(json=schema)).text)["patternProperties"]
    assert list(found.values()) == [{"minimum": 1}, {"maximum": 5}]
