"""The format in which Hermes, Qwen and the demo model write calls.

Some text
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oakford"}}
</tool_call>
"""

from __future__ import annotations

import re

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallParser
from quire.serve.answer.tools.json_reader import MalformedJson

BEGIN, END = "<tool_call>", "</tool_call>"
_OBJECT = re.compile(r'\{\\?"name\\?"')


def matches(template: str) -> bool:
    """Return whether a chat template asks for this format. Others put XML between the same tags."""
    return BEGIN in template and _OBJECT.search(template) is not None


class HermesParser(CallParser):
    """The parser of the Hermes format."""

    def _run(self) -> ParserSteps[None]:
        while (yield from self._text_until(BEGIN)):
            yield from self._attempt(self._block())

    def _block(self) -> ParserSteps[None]:
        """Read one call, or a list, between the tags. The closing tag may be cut off or missing at the end."""
        yield from self._spaces()
        self._advance(self._at + len(BEGIN))
        yield from self._spaces()
        if (yield from self._peek()) == "[":
            yield from self._list_of_calls()
        else:
            yield from self._call()
        yield from self._spaces()
        if (yield from self._sees(END)):
            self._advance(self._at + len(END))
        elif END.startswith(self._text[self._at :]):  # the answer ends here
            self._advance(len(self._text))
        else:
            raise MalformedJson
        self._accept()


def shape(template: str, single: bool) -> CallShape:
    return CallShape(
        open=f'{BEGIN}\n{{"name": ', middle=', "arguments": ', close=f"}}\n{END}", between="\n", mark=BEGIN
    )
