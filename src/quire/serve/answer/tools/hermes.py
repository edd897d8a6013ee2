"""Calls as Hermes, Qwen and the demo model write them.

Some text
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oakford"}}
</tool_call>
"""

from __future__ import annotations

import re

from quire.serve.answer.incremental import Steps
from quire.serve.answer.tools.calls import CallParser
from quire.serve.answer.tools.grammar import CallShape
from quire.serve.answer.tools.json_reader import MalformedJson

BEGIN, END = "<tool_call>", "</tool_call>"
_OBJECT = re.compile(r'\{\\?"name\\?"')


def matches(template: str) -> bool:
    """Whether a chat template asks for such calls; others put XML between the same tags."""
    return BEGIN in template and _OBJECT.search(template) is not None


class HermesParser(CallParser):
    def _run(self) -> Steps[None]:
        while (yield from self._text_until(BEGIN)):
            yield from self._attempt(self._block())

    def _block(self) -> Steps[None]:
        """One call between the tags, or a list of them. The closing tag, or some of it, may be missing at the end."""
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
