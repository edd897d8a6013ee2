"""Grammars of answers that hold calls of tools, in the Lark dialect of llguidance.

Made of pieces: a thought before the answer, calls in the shape of the model's format, free text between them,
another constraint as the alternative to calling. `%json` takes a JSON schema, `<[7]>` the token with that id.
Names of rules in lower case, of lexemes in upper case; a rule marked lazy ends as soon as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.frontend.patterns import with_ecma_classes
from quire.serve.answer.reasoning import Thought
from quire.serve.answer.tools.request import ToolFunction, ToolUse
from quire.serve.http.errors import bad_request
from quire.types import StructuredOutputsParams

_ANY_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a format writes calls: `open` name `middle` arguments `close`, with `between` two of them.

    `begin` and `end` stand around all calls. `mark` is what nothing but a call begins with, in free text; an
    empty one says that calls come at the beginning of the answer or not at all.
    """

    open: str
    middle: str
    close: str
    between: str
    begin: str = ""
    end: str = ""
    mark: str = ""
    quoted: bool = True  # the name is a JSON string


class Lark:
    """Rules of one grammar. `special` are the texts that are special tokens, with their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, None] = {}  # in the order in which they came
        self._pattern = re.compile("|".join(f"({re.escape(word)})" for word in special) or "(?!)")

    def add(self, rule: str) -> None:
        self._rules[rule] = None

    def literal(self, text: str) -> str:
        """`text` as a sequence of strings and special tokens."""
        parts, at = [], 0
        for match in self._pattern.finditer(text):
            parts += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part)

    def up_to(self, name: str, word: str) -> str:
        """A rule for free text that ends with the first `word`."""
        self.add(_ANY_TEXT)
        if word in self._special:
            self.add(f"{name}: TEXT {self.literal(word)}")
        else:
            self.add(f"{name}[lazy]: TEXT {self.literal(word)}")
        return name

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])


def _quoted(text: str) -> str:
    """A Lark string. What reads the grammar looks for %json, and must not find it in here."""
    return json.dumps(text, ensure_ascii=False).replace("%", "\\u0025") if text else ""


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def arguments_schema(function: ToolFunction, exact: bool) -> dict[str, Any]:
    """The schema that arguments must satisfy; any object, unless `exact`."""
    parameters = function.parameters
    if parameters.get("type", "object") != "object":
        raise bad_request(
            f"the parameters of {function.name[:64]!r} must be a JSON schema of type object", "tools"
        )
    return {**parameters, "type": "object"} if exact else {"type": "object"}


def calls(lark: Lark, shape: CallShape, use: ToolUse, exact: bool, without_mark: bool = False) -> str:
    """An expression for one call or several. `exact`: arguments satisfy the schemas of all functions, not
    only of strict ones. `without_mark`: the first call's mark has come already."""
    for index, function in enumerate(use.functions):
        name = json.dumps(function.name, ensure_ascii=False) if shape.quoted else function.name
        schema = arguments_schema(function, exact or function.strict)
        lark.add(
            f"function_{index}: {lark.literal(name + shape.middle)} {_json(schema)} {lark.literal(shape.close)}"
        )
    lark.add("function: " + " | ".join(f"function_{index}" for index in range(len(use.functions))))
    first = lark.literal((shape.begin + shape.open).removeprefix(shape.mark if without_mark else ""))
    parts = [first, "function"]
    if not use.single:
        parts.append(f"({lark.literal(shape.between + shape.open)} function)*")
    return " ".join(part for part in [*parts, lark.literal(shape.end)] if part)


def text_with_calls(lark: Lark, shape: CallShape, use: ToolUse) -> str:
    """Free text in which whatever begins as a call is one."""
    lark.add(_ANY_TEXT)
    if shape.mark:
        lark.add(f"called: {calls(lark, shape, replace(use, single=True), False, without_mark=True)}")
        return f"({lark.up_to('uncalled', shape.mark)} called){'?' if use.single else '*'} TEXT"
    lark.add(r"OTHER: /[^\s{\[](.|\n)*/")
    return f'{calls(lark, shape, use, False)} | OTHER | ""'


def constrained(lark: Lark, wanted: StructuredOutputsParams) -> str | None:
    """An expression for what `wanted` asks; None for a grammar, which cannot be part of another."""
    if wanted.json is not None:
        text = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
        return f"%json {text}"
    if wanted.json_object:
        return _json({"type": "object"})
    if wanted.choice is not None:
        return " | ".join(_quoted(choice) or '""' for choice in wanted.choice)
    if wanted.regex is not None:
        lark.add(f"PATTERN: /{_slashes_escaped(with_ecma_classes(wanted.regex))}/")
        return "PATTERN"
    return None


def _slashes_escaped(regex: str) -> str:
    """Lark ends a pattern at the first bare slash."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)


def after_thought(lark: Lark, thought: Thought, inside: bool, body: str) -> str:
    """`body` behind a thought: the rest of one that the prompt began, or a whole one, or none."""
    lark.add(r"GAP: /\n{0,2}/")
    rest = lark.up_to("thought", thought.end)
    if inside:
        return f"{rest} GAP ({body})"
    return f"({lark.literal(thought.begin)} {rest} GAP)? ({body})"
