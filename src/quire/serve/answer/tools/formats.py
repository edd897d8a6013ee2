"""The formats in which models write calls. They are chosen by name, or by the chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.serve.answer.tools import generic, hermes, llama3, mistral
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallOptions, CallParser, call_id


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format.

    Attributes:
        name: its name in `--tool-call-parser`.
        parser: the class of its parser.
        matches: returns whether a chat template asks for this format.
        shape: returns the shape of calls for a chat template; its second argument allows one call only.
        marks: texts that the parser must see even if they are special tokens.
        make_id: returns a new id for a call.
    """

    name: str
    parser: type[CallParser]
    matches: Callable[[str], bool]
    shape: Callable[[str, bool], CallShape]
    marks: tuple[str, ...] = ()
    make_id: Callable[[], str] = call_id

    def make_parser(self, names: frozenset[str], hold: bool, single: bool) -> CallParser:
        return self.parser(CallOptions(names, hold, single, self.make_id))


_FORMATS = (
    ToolFormat(
        "mistral",
        mistral.MistralParser,
        mistral.matches,
        mistral.shape,
        (mistral.MARK, mistral.ID_MARK, mistral.ARGUMENTS_MARK),
        mistral.call_id,
    ),
    ToolFormat("hermes", hermes.HermesParser, hermes.matches, hermes.shape, (hermes.BEGIN, hermes.END)),
    ToolFormat("llama3_json", llama3.LlamaParser, llama3.matches, llama3.shape),
    ToolFormat("json", generic.GenericParser, lambda template: True, generic.shape),  # matches every template
)
TOOL_PARSERS = {tool_format.name: tool_format for tool_format in _FORMATS}
_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "generic": "json",
}


def known_tool_parser(name: str) -> bool:
    return name in ("auto", "none") or name in TOOL_PARSERS or name in _ALIASES


def choose_format(name: str, template: str) -> ToolFormat | None:
    """Return the format of a parser by its name; for `auto` the first that matches the template, for `none` None."""
    if name == "none":
        return None
    if name == "auto":
        return next(tool_format for tool_format in _FORMATS if tool_format.matches(template))
    return TOOL_PARSERS[_ALIASES.get(name, name)]
