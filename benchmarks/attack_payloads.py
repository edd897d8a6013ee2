"""The hostile requests of attacks.py, one for each class of defect."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Attack:
    """A kind of request that the attacker repeats.

    `body` builds the bytes once, in the attacker's process. `at_once` requests are open at the same time.
    """

    name: str
    path: str
    body: Callable[[], bytes]
    at_once: int = 4
    pause_s: float = 0.05
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def fixed(value: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(value).encode()


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


def template(name: str, text: str, at_once: int = 4) -> Attack:
    return Attack(f"templates:{name}", "/v1/chat/completions", fixed(chat(chat_template=text)), at_once)


def text(name: str, path: str, make: Callable[[], Any], at_once: int = 6) -> Attack:
    return Attack(f"tokens:{name}", path, lambda: json.dumps(make()).encode(), at_once)


def body(name: str, path: str, make: Callable[[], bytes], at_once: int = 4, **headers: str) -> Attack:
    return Attack(f"bodies:{name}", path, make, at_once, headers=headers)


def grammar(name: str, structured: dict[str, Any], at_once: int = 8) -> Attack:
    asked = chat(structured_outputs=structured) | {"max_tokens": 400}
    return Attack(f"grammar:{name}", "/v1/chat/completions", fixed(asked), at_once)


def nested_refs(depth: int) -> dict[str, Any]:
    """Build a schema whose `$ref`s double at each level: 2**depth when expanded."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, depth + 1):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        defs[f"d{level}"] = {
            "type": "object",
            "properties": {"a": below, "b": below},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    return {"$defs": defs, "$ref": f"#/$defs/d{depth}"}


DOUBLED = "{% set ns = namespace(x=[1]) %}{% for _ in range(27) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"

ATTACKS = [
    template("sum", '{% set x=[["a"]*2000]*2000 %}{{ (x|sum(start=[]))|length }}'),
    template("sum of 4000", '{% set x=[["a"]*4000]*4000 %}{{ (x|sum(start=[]))|length }}'),
    template("doubled, tojson", DOUBLED + "{{ (ns.x|tojson)|length }}"),
    template("doubled, str", DOUBLED + "{{ (ns.x|string)|length }}"),
    template("doubled, ==", DOUBLED + "{{ ns.x == ns.x + [] }}"),
    template("sort", "{{ (range(10000000)|sort(reverse=true))|length }}"),
    template("format", "{{ '{:999999999}'.format(1)|length }}"),
    template("long source", "{{ 1 }}" * 100_000),
    template("nested loops", LOOPS, at_once=40),
    template("power", "{{ 9**9**9 }}"),
    template("recursion", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"),
    template("output", "{{ 'a' * 100000000 }}"),
    text("tokenize 1 MB", "/tokenize", lambda: {"prompt": "the red gardener " * (MIB // 17)}),
    text("tokenize one word", "/tokenize", lambda: {"prompt": "a" * MIB}),
    text("tokenize 12 MB", "/tokenize", lambda: {"prompt": "the red gardener " * (12 * MIB // 17)}),
    text(
        "count 1 MB",
        "/v1/messages/count_tokens",
        lambda: {
            "model": "demo",
            "messages": [{"role": "user", "content": "the red gardener " * (MIB // 17)}],
        },
    ),
    text("completion 12 MB", COMPLETION, lambda: {"prompt": "the red gardener " * (12 * MIB // 17)}),
    text(
        "chat 12 MB", CHAT, lambda: chat() | {"messages": [{"role": "user", "content": "a b " * (3 * MIB)}]}
    ),
    text("embeddings 12 MB", "/v1/embeddings", lambda: {"input": ["a b " * (3 * MIB)]}),
    text("stop strings", COMPLETION, lambda: {"prompt": "a", "max_tokens": 4, "stop": ["x" * MIB] * 4}),
    text(
        "bad words", COMPLETION, lambda: {"prompt": "a", "max_tokens": 4, "bad_words": ["red " * 1000] * 1000}
    ),
    text("detokenize", "/detokenize", lambda: {"tokens": [5] * 3_000_000}),
    body("empty lists", COMPLETION, lambda: b'{"prompt":"a","x":[' + b"[]," * (5 * MIB) + b"[]]}"),
    body(
        "unknown keys",
        CHAT,
        lambda: json.dumps(chat() | {f"k{i}": 1 for i in range(1_000_000)}).encode(),
    ),
    body(
        "logit_bias",
        COMPLETION,
        lambda: json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1_000_000)}}).encode(),
    ),
    body(
        "messages",
        CHAT,
        lambda: json.dumps(chat() | {"messages": [{"role": "user", "content": "a"}] * 60_000}).encode(),
    ),
    body("nesting", CHAT, lambda: b'{"messages":' + b"[" * (8 * MIB)),
    body("token lists", COMPLETION, lambda: json.dumps({"prompt": [[5]] * 500_000}).encode()),
    body(
        "tools",
        CHAT,
        lambda: json.dumps(
            chat() | {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(50_000)]}
        ).encode(),
    ),
    body(
        "gzip",
        COMPLETION,
        lambda: gzip.compress(b'{"prompt":"' + b"a" * (512 * MIB) + b'"}'),
        **{"content-encoding": "gzip"},
    ),
    body("twenty at once", COMPLETION, lambda: b'{"prompt":"a","x":[' + b"[]," * (5 * MIB) + b"[]]}", 20),
    grammar("two counts", {"regex": ".*x.{1000}y.{1000}"}),
    grammar("deep refs", {"json": nested_refs(40)}),
    grammar("alternatives", {"regex": "(a|b|ab|ba|aab|abb){1,3000}(.*c){1,200}"}),
    grammar("enum", {"json": {"enum": [f"value {i}" for i in range(20_000)]}}),
    Attack(
        "fairness:slots",
        COMPLETION,
        fixed({"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "stream": True}),
        at_once=500,
    ),
    Attack(
        "fairness:n",
        COMPLETION,
        fixed({"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "n": 64}),
        at_once=20,
    ),
    Attack(
        "fairness:prompts",
        COMPLETION,
        fixed({"prompt": "the red gardener " * 120, "max_tokens": 64, "ignore_eos": True}),
        at_once=300,
    ),
    Attack(
        "fairness:tokenizer",
        "/tokenize",
        fixed({"prompt": "the red gardener " * 3000}),
        at_once=100,
        pause_s=0.0,
    ),
]
