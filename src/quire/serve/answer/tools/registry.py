"""The formats in which models write calls, chosen by name or by what a chat template asks the model to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.serve.answer.tools import generic, hermes, llama, mistral
from quire.serve.answer.tools.calls import CallOptions, CallParser, call_id
from quire.serve.answer.tools.grammar import CallShape


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    parser: type[CallParser]
    matches: Callable[[str], bool]  # whether a chat template asks for this format
    shape: Callable[[str, bool], CallShape]  # by chat template, and whether there may be one call only
    marks: tuple[str, ...] = ()  # which the parser must see, even if they are special tokens
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
    ToolFormat("llama3_json", llama.LlamaParser, llama.matches, llama.shape),
    ToolFormat("json", generic.GenericParser, lambda template: True, generic.shape),  # for all others
)
TOOL_PARSERS = {found.name: found for found in _FORMATS}
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
    """The format by the name of a parser; auto: the first that the chat template matches; none: None."""
    if name == "none":
        return None
    if name == "auto":
        return next(found for found in _FORMATS if found.matches(template))
    return TOOL_PARSERS[_ALIASES.get(name, name)]
