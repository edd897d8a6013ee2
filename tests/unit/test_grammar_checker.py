"""The helper process: hostile specs end there, within their limits, without an effect on other specs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.location import locate_model
from quire.frontend.structured_spec import grammar_spec
from quire.grammar.checker import Checker, CheckerProcess
from quire.grammar.checker_process import Check
from quire.types import GrammarSpec, Overloaded, QuireError, RequestError, StructuredOutputsParams

GOOD = GrammarSpec("regex", "a{2,4}")


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker()
    yield checker
    checker.close()


def refusal(checker: Checker, **given: Any) -> str:
    """Return why a spec is refused, before or in the process; empty if it is accepted."""
    try:
        checker.check(grammar_spec(StructuredOutputsParams(**given)))
    except RequestError as error:
        return str(error)
    return ""


def chain(n: int, link: Any) -> dict[str, Any]:
    """Build `n` $defs, each of which refers to the next through `link`."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {"type": "integer"}}}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "refers to itself": ({"json": {"$ref": "#"}}, "no text satisfies"),
    "in a circle": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        "no text satisfies",
    ),
    "crashes the library": ({"json": chain(1000, lambda ref: ref)}, "too deeply"),
    "crashes through objects": (
        {"json": chain(900, lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]})},
        "too deeply",
    ),
    "exponential": (
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}": {"const": k}}} for k in (0, 1)]} for i in range(30)
                ]
            }
        },
        "too large",
    ),
    "hangs the library": ({"json": {"type": "integer", "multipleOf": 9999991}}, "more than 2 s"),
    "exponential terminals": (
        {"grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"\n'},
        "cannot be enforced",
    ),
    "ten megabytes": ({"json": {"enum": [f"value {i}" for i in range(600_000)]}}, "at most"),
    "a long enumeration": ({"json": {"enum": [f"{i:x}" for i in range(9000)]}}, ""),
    "nested repeats": ({"regex": "((((a{0,20}){0,20}){0,20}){0,20}){0,20}"}, ""),
    "catastrophic elsewhere": ({"regex": "(a+)+$"}, ""),
    "many states": ({"regex": ".*a.{200}"}, ""),
    "deep regex": ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "cannot be enforced"),
    "deep grammar": (
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        "grammar",
    ),
    "nothing": ({"regex": r"[^\s\S]"}, "no text satisfies"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences"),
    "fetches": ({"json": {"$ref": "http://127.0.0.1/x"}}, "not present in a registry"),
    "reads files": ({"json": {"$ref": "file:///etc/passwd"}}, "not present in a registry"),
    "a lone surrogate": ({"json": '{"const": "\\ud800"}'}, "cannot be enforced"),
    "special tokens": ({"grammar": 'start: "a" <|im_end|>'}, "unknown special token"),
    "overlapping oneOf": ({"json": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}, ""),
    "contradiction": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_specs_end_in_time(checker: Checker, name: str) -> None:
    given, reason = HOSTILE[name]
    begin = time.monotonic()
    found = refusal(checker, **given)
    assert reason in found and bool(reason) == bool(found), found
    assert time.monotonic() - begin < 30, "with a processor to itself, three seconds"
    assert "Traceback" not in found and len(found) < 700
    assert json.loads(checker.check(GOOD).text)["grammars"]


def test_one_that_hangs_does_not_delay_others(checker: Checker) -> None:
    checker.check(GOOD)
    slow = threading.Thread(
        target=refusal, args=(checker,), kwargs={"json": {"type": "integer", "multipleOf": 9999991}}
    )
    slow.start()
    for i in range(5):
        checker.check(GrammarSpec("regex", f"a{{2,{i + 3}}}"))
    assert slow.is_alive()
    slow.join()


def test_many_at_once(checker: Checker) -> None:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(checker.check(GrammarSpec("regex", f"b{{1,{i + 1}}}")).text))
        for i in range(40)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 40


def test_a_dead_process_is_replaced() -> None:
    checker = Checker()
    checker.check(GOOD)
    os.kill(checker.process.pid, signal.SIGKILL)
    while not checker.process.dead:
        time.sleep(0.01)
    assert checker.check(GOOD)
    checker.close()
    checker.close()


def test_questions_of_a_dying_process_are_answered() -> None:
    checker = Checker()
    checker.check(GOOD)
    os.kill(checker.process.pid, signal.SIGSTOP)
    found: list[QuireError] = []

    def ask() -> None:
        try:
            checker.check(GOOD)
        except QuireError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not checker.process.num_pending:
        time.sleep(0.01)
    os.kill(checker.process.pid, signal.SIGKILL)
    thread.join(10)
    assert len(found) == 1 and isinstance(found[0], Overloaded)
    checker.close()


ANSWERS_BEFORE_IT_READS = """
import os
from quire.grammar.checker_process import Frames, Verdict, VocabularyTable, _write, frame
_write(1, frame(VocabularyTable([])))
data = os.read(0, 1)
for _ in range(2):  # each longer than a pipe holds
    _write(1, frame(Verdict(99, "x" * 300_000)))
frames = Frames()
while not frames.push(data):
    data = os.read(0, 1 << 16)
_write(1, frame(Verdict(0, "done")))
os.read(0, 1)
"""


def test_long_questions_and_long_answers_do_not_wait_for_each_other() -> None:
    process = CheckerProcess([sys.executable, "-c", ANSWERS_BEFORE_IT_READS])
    question, found = Check(0, GrammarSpec("regex", "a" * 300_000)), []
    asking = threading.Thread(target=lambda: found.append(process.ask(question).text), daemon=True)
    try:
        asking.start()
        asking.join(30)
        assert found == ["done"]
    finally:
        os.kill(process.pid, signal.SIGKILL)
    process.close()


def test_the_table_of_a_real_tokenizer() -> None:
    checker = Checker(locate_model("demo").path, 2048)
    tokens = checker.tokens()
    assert len(tokens) == 2048 and b"a" in tokens and tokens.count(b"") >= 1
    assert checker.check(GOOD)
    checker.close()


def test_a_missing_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    checker = Checker(tmp_path, 100)
    with pytest.raises(RequestError, match=r"has no tokenizer\.json"):
        checker.tokens()
    checker.close()


def test_a_spec_is_refused_for_the_same_reason_as_the_tokens(tmp_path: Path) -> None:
    """A process without a tokenizer ends at once, so `check` must read the table first."""
    checker = Checker(tmp_path, 100)
    with pytest.raises(RequestError, match=r"has no tokenizer\.json"):
        checker.check(GOOD)
    checker.close()


def test_memory_is_told_in_bytes(checker: Checker) -> None:
    large = grammar_spec(StructuredOutputsParams(json={"enum": [f"{i:x}" for i in range(9000)]}))
    assert 2 << 20 < checker.check(large).memory_bytes < 200 << 20
