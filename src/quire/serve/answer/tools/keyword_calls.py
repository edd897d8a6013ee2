"""The base of parsers of formats that write arguments one by one. They put the JSON object together."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.parser import Arguments
from quire.serve.answer.tools.calls import CallParser
from quire.serve.answer.tools.json_reader import Sink, discard
from quire.serve.answer.tools.parameters import Parameter, parameter


@dataclass(slots=True)
class KeywordArguments:
    """The arguments of the call in progress. A repeated key is dropped, because an object has each key once."""

    index: int
    function: str
    keys: set[str] = field(default_factory=set)


class KeywordCallParser(CallParser):
    """A parser that emits the arguments of a call key by key."""

    def _open_arguments(self, name: str) -> KeywordArguments:
        arguments = KeywordArguments(self._start_call(name), name)
        self._emit(Arguments(arguments.index, "{"))
        return arguments

    def _add_key(self, arguments: KeywordArguments, key: str) -> Sink:
        """Emit a key and return the sink for the JSON of its value."""
        if key in arguments.keys:
            return discard
        comma = ", " if arguments.keys else ""
        arguments.keys.add(key)
        index = arguments.index
        self._emit(Arguments(index, f"{comma}{json.dumps(key, ensure_ascii=False)}: "))
        return lambda text: self._emit(Arguments(index, text))

    def _close_arguments(self, arguments: KeywordArguments) -> None:
        self._emit(Arguments(arguments.index, "}"))

    def _comma_before(self, end: str) -> ParserSteps[None]:
        """Read the comma after an item, unless `end` comes next, and the white space around it."""
        yield from self._spaces()
        if (yield from self._peek()) != end:
            yield from self._character(",")
            yield from self._spaces()

    def _parameter(self, arguments: KeywordArguments, key: str) -> Parameter:
        return parameter(self._options.schemas.get(arguments.function, {}), key)


def escaped(text: str) -> str:
    """Return `text` as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
