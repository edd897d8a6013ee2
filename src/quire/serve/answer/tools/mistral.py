"""The format in which Mistral models write calls: older models as a list, newer ones one by one.

Some text[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oakford"}}]
Some text[TOOL_CALLS]get_weather[ARGS]{"city": "Oakford"}[TOOL_CALLS]...
"""

from __future__ import annotations

import re
import secrets
import string

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallParser, PartialCall
from quire.serve.answer.tools.json_reader import MalformedJson

MARK, ID_MARK, ARGUMENTS_MARK = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}\"]+")
_ALPHABET = string.ascii_letters + string.digits


def matches(template: str) -> bool:
    return MARK in template


def call_id() -> str:
    """Return an id of nine letters and digits: these models' templates take no others."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class MistralParser(CallParser):
    """The parser of Mistral's format."""

    def _run(self) -> ParserSteps[None]:
        while (yield from self._text_until(MARK)):
            yield from self._attempt(self._block())

    def _block(self) -> ParserSteps[None]:
        yield from self._spaces()
        self._advance(self._at + len(MARK))
        yield from self._spaces()
        if (yield from self._peek()) == "[":
            yield from self._list_of_calls()
        else:
            yield from self._named_call()
            self._accept()

    def _named_call(self) -> ParserSteps[None]:
        name = yield from self._while(_NAME)
        if (yield from self._sees(ID_MARK)):
            self._advance(self._at + len(ID_MARK))
            yield from self._while(_NAME)
        if (yield from self._sees(ARGUMENTS_MARK)):
            self._advance(self._at + len(ARGUMENTS_MARK))
        yield from self._spaces()
        if (yield from self._peek()) != "{":
            raise MalformedJson
        yield from self._object_of_arguments(PartialCall(self._start_call(name)))


def shape(template: str, single: bool) -> CallShape:
    if ARGUMENTS_MARK in template:
        return CallShape(open=MARK, middle=ARGUMENTS_MARK, close="", between="", mark=MARK, quoted=False)
    return CallShape(
        open='{"name": ',
        middle=', "arguments": ',
        close="}",
        between=", ",
        begin=f"{MARK}[",
        end="]",
        mark=MARK,
    )
