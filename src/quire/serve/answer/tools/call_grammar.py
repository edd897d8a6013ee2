"""Grammars of answers with tool calls, in the Lark dialect of llguidance.

A grammar combines reasoning before the answer, calls in the model's format, free text between them, and another
constraint as the alternative to calls. In Lark, `%json` takes a JSON schema and `<[7]>` is the token with id 7. Rules
have lower-case names and lexemes upper-case ones. A lazy rule ends as soon as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from quire.frontend.patterns import with_ecma_classes
from quire.serve.answer.reasoning import ReasoningMarks
from quire.serve.answer.tools.tool_use import ToolFunction, ToolUse
from quire.serve.http.errors import bad_request
from quire.types import StructuredOutputsParams

ANY_TEXT = "TEXT"
_ANY_TEXT_RULE = r"TEXT: /(.|\n)*/"


def json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def json_arguments(lark: LarkGrammar, prefix: str, schema: Mapping[str, Any]) -> str:
    """Return an expression for arguments as one JSON object."""
    return json_rule(schema)


# Takes the grammar, the start of the names of new rules, and the schema of the arguments; returns an expression.
ArgumentsRule: TypeAlias = Callable[["LarkGrammar", str, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class CallShape:
    """The text around the name and the arguments of a call: `open` name `middle` arguments `close`.

    Attributes:
        open, middle, close: the text of each call.
        between: the text between two calls.
        begin, end: the text around all calls.
        mark: the text with which only a call starts. If it is empty, calls start the answer or do not occur.
        quoted: whether the name is a JSON string.
        numbered: whether a colon and the number of the call follow the name.
        parallel: whether the model can write several calls.
        arguments: writes the rules of the arguments of one function and returns an expression for them.
    """

    open: str
    middle: str
    close: str
    between: str
    begin: str = ""
    end: str = ""
    mark: str = ""
    quoted: bool = True
    numbered: bool = False
    parallel: bool = True
    arguments: ArgumentsRule = json_arguments


class LarkGrammar:
    """A grammar under construction. Owns its rules."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """Start an empty grammar; `special` maps the texts of special tokens to their ids."""
        self._special = special
        self._rules: dict[str, None] = {}  # an ordered set
        self._pattern = re.compile("|".join(f"({re.escape(word)})" for word in special) or "(?!)")

    def add(self, rule: str) -> None:
        self._rules[rule] = None

    def literal(self, text: str) -> str:
        """Return `text` as an expression of strings and special tokens."""
        parts, at = [], 0
        for match in self._pattern.finditer(text):
            parts += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part)

    def up_to(self, name: str, word: str) -> str:
        """Add a rule for free text that ends with the first `word`; return its name."""
        self.add(_ANY_TEXT_RULE)
        if word in self._special:
            self.add(f"{name}: TEXT {self.literal(word)}")
        else:
            self.add(f"{name}[lazy]: TEXT {self.literal(word)}")
        return name

    def text(self, start: str) -> str:
        """Return the grammar's text with `start` as the expression for the whole answer."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def _quoted(text: str) -> str:
    """Write `text` as a Lark string. The percent sign is escaped because Quire searches grammars for `%json`."""
    return json.dumps(text, ensure_ascii=False).replace("%", "\\u0025") if text else ""


def arguments_schema(function: ToolFunction, exact: bool) -> dict[str, Any]:
    """Return the JSON schema for the arguments of a function: its own if `exact`, otherwise any object.

    Raises:
        ApiError: 400 if the function's own schema is not of type object.
    """
    parameters = function.parameters
    if parameters.get("type", "object") != "object":
        raise bad_request(
            f"the parameters of {function.name[:64]!r} must be a JSON schema of type object", "tools"
        )
    return {**parameters, "type": "object"} if exact else {"type": "object"}


def calls_expression(
    lark: LarkGrammar, shape: CallShape, use: ToolUse, exact: bool, without_mark: bool = False
) -> str:
    """Add the rules of calls and return an expression for one or several calls.

    Args:
        lark: the grammar.
        shape: the format of calls.
        use: the functions, and whether only one call is allowed.
        exact: enforce the schemas of all functions, not only of strict ones.
        without_mark: leave out the first call's mark because it precedes the expression.
    """
    for index, function in enumerate(use.functions):
        name = json.dumps(function.name, ensure_ascii=False) if shape.quoted else function.name
        schema = arguments_schema(function, exact or function.strict)
        parts = [lark.literal(name), lark.literal(shape.middle)]
        if shape.numbered:
            lark.add("NUMBER: /[0-9]{1,4}/")
            parts.insert(1, '":" NUMBER')
        parts += [shape.arguments(lark, f"arguments_{index}", schema), lark.literal(shape.close)]
        lark.add(f"function_{index}: {' '.join(part for part in parts if part)}")
    lark.add("function: " + " | ".join(f"function_{index}" for index in range(len(use.functions))))
    first = lark.literal((shape.begin + shape.open).removeprefix(shape.mark if without_mark else ""))
    parts = [first, "function"]
    if not use.single and shape.parallel:
        parts.append(f"({lark.literal(shape.between + shape.open)} function)*")
    return " ".join(part for part in [*parts, lark.literal(shape.end)] if part)


def text_with_calls(lark: LarkGrammar, shape: CallShape, use: ToolUse) -> str:
    """Return an expression for free text in which all text that starts like a call is a call."""
    lark.add(_ANY_TEXT_RULE)
    if shape.mark:
        lark.add(
            f"called: {calls_expression(lark, shape, replace(use, single=True), False, without_mark=True)}"
        )
        return f"({lark.up_to('uncalled', shape.mark)} called){'?' if use.single else '*'} TEXT"
    lark.add(r"OTHER: /[^\s{\[](.|\n)*/")
    return f'{calls_expression(lark, shape, use, False)} | OTHER | ""'


def constraint_expression(lark: LarkGrammar, constraint: StructuredOutputsParams) -> str | None:
    """Return an expression for a constraint, or None for a grammar, which cannot be part of another grammar."""
    if constraint.json is not None:
        text = constraint.json if isinstance(constraint.json, str) else json.dumps(constraint.json)
        return f"%json {text}"
    if constraint.json_object:
        return json_rule({"type": "object"})
    if constraint.choice is not None:
        return " | ".join(_quoted(choice) or '""' for choice in constraint.choice)
    if constraint.regex is not None:
        lark.add(f"PATTERN: /{_slashes_escaped(with_ecma_classes(constraint.regex))}/")
        return "PATTERN"
    return None


def _slashes_escaped(regex: str) -> str:
    """Escape bare slashes: Lark ends a pattern at the first one."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)


def as_content(lark: LarkGrammar, marks: ReasoningMarks, body: str) -> str:
    """Return an expression for `body` between the marks that the model writes around its content."""
    lark.add(_ANY_TEXT_RULE)
    parts = [lark.literal(marks.content_begin), f"({body})", lark.literal(marks.content_end)]
    return " ".join(part for part in parts if part)


def after_reasoning(lark: LarkGrammar, marks: ReasoningMarks, inside: bool, body: str) -> str:
    """Return an expression for `body` after reasoning, which is optional unless the prompt opened it (`inside`)."""
    gap = "GAP"
    if marks.gap is None:
        lark.add(r"GAP: /\n{0,2}/")
    else:
        gap = lark.literal(marks.gap)
    rest = lark.up_to("thought", marks.end)
    if inside:
        return f"{rest} {gap} ({body})"
    return f"({lark.literal(marks.begin)} {rest} {gap})? ({body})"
