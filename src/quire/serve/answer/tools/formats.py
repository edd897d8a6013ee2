"""The formats in which models write calls. They are chosen by name, or by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.serve.answer.tools import (
    gemma,
    generic,
    hermes,
    json_between_marks,
    llama3,
    mistral,
    named_json,
    pythonic,
    tagged,
)
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallOptions, CallParser, call_id


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format.

    Attributes:
        name: its name in `--tool-call-parser`.
        parser: returns a new parser.
        matches: returns whether a chat template asks for this format.
        shape: returns the shape of calls for a chat template; its second argument allows one call only.
        marks: texts that the parser must see even if they are special tokens.
        make_id: returns a new id for a call.
    """

    name: str
    parser: Callable[[CallOptions], CallParser]
    matches: Callable[[str], bool]
    shape: Callable[[str, bool], CallShape]
    marks: tuple[str, ...] = ()
    make_id: Callable[[], str] = call_id

    def make_parser(
        self,
        names: frozenset[str],
        hold: bool,
        single: bool,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> CallParser:
        return self.parser(CallOptions(names, hold, single, self.make_id, schemas or {}))


def _parameterized(
    name: str,
    parser: Callable[[Any, CallOptions], CallParser],
    shape: Callable[[Any, str, bool], CallShape],
    marks: Any,
    matches: Callable[[str], bool],
) -> ToolFormat:
    """Return a format whose parser and shape take the marks of the format first."""
    return ToolFormat(name, partial(parser, marks), matches, partial(shape, marks), marks.marks)


def _has(*texts: str) -> Callable[[str], bool]:
    """Return a function that says whether a template contains all of `texts`."""
    return lambda template: all(text in template for text in texts)


_tagged = partial(_parameterized, parser=tagged.TaggedParser, shape=tagged.shape)
_named = partial(_parameterized, parser=named_json.NamedJsonParser, shape=named_json.shape)
_listed = partial(_parameterized, parser=json_between_marks.MarkedJsonParser, shape=json_between_marks.shape)
_pythonic = partial(_parameterized, parser=pythonic.PythonicParser, shape=pythonic.shape)
_gemma = partial(_parameterized, parser=gemma.GemmaParser, shape=gemma.shape)

_FORMATS = (
    ToolFormat(
        "mistral",
        mistral.MistralParser,
        mistral.matches,
        mistral.shape,
        (mistral.MARK, mistral.ID_MARK, mistral.ARGUMENTS_MARK),
        mistral.call_id,
    ),
    _listed("apriel", marks=json_between_marks.APRIEL, matches=_has("<tool_calls>[")),
    ToolFormat("hermes", hermes.HermesParser, hermes.matches, hermes.shape, (hermes.BEGIN, hermes.END)),
    _tagged("seed_oss", marks=tagged.SEED_OSS, matches=_has("seed:tool_call")),
    _tagged("minimax_m2", marks=tagged.MINIMAX_M2, matches=_has("<minimax:tool_call>")),
    _tagged(
        "qwen3_coder", marks=tagged.QWEN3_CODER, matches=_has("<tool_call>", "<function=", "<parameter=")
    ),
    _tagged("glm45", marks=tagged.GLM, matches=tagged.has_line_breaks),
    _tagged("glm47", marks=tagged.GLM47, matches=_has("<tool_call>", "<arg_key>")),
    _tagged("deepseek_v32", marks=tagged.DEEPSEEK_V32, matches=_has("DSML", "function_calls>")),
    _tagged("deepseek_v4", marks=tagged.DEEPSEEK_V4, matches=_has("DSML", "tool_calls>")),
    _tagged("step3", marks=tagged.STEP3, matches=_has("steptml:invoke")),
    _named("deepseek_v3", marks=named_json.DEEPSEEK_V3, matches=_has("<｜tool▁call▁begin｜>", "```json")),
    _named("deepseek_v31", marks=named_json.DEEPSEEK_V31, matches=_has("<｜tool▁call▁begin｜>")),
    _named("kimi_k2", marks=named_json.KIMI_K2, matches=_has("<|tool_call_argument_begin|>")),
    _named(
        "gpt_oss",
        parser=named_json.HarmonyParser,
        marks=named_json.HARMONY,
        matches=_has("<|channel|>commentary"),
    ),
    _gemma("gemma", marks=gemma.GEMMA4, matches=_has("<|tool_call>call:")),
    _gemma("function_gemma", marks=gemma.FUNCTION_GEMMA, matches=_has("<start_function_call>")),
    _pythonic("lfm2", marks=pythonic.LFM2, matches=pythonic.matches_lfm2),
    _pythonic("olmo3", marks=pythonic.OLMO3, matches=_has("<function_calls>")),
    _listed("nemotron", marks=json_between_marks.NEMOTRON, matches=_has("<TOOLCALL>")),
    _listed("cohere", marks=json_between_marks.COHERE, matches=_has("<|START_ACTION|>")),
    _listed(
        "cohere_plus", marks=json_between_marks.COHERE_PLUS, matches=_has("Action:", "```json", "tool_name")
    ),
    _listed("phi4_functools", marks=json_between_marks.PHI4, matches=_has("functools[")),
    _listed("phi4", marks=json_between_marks.PHI4_TAGS, matches=_has("<|tool|>", "<|/tool|>")),
    _listed("granite", marks=json_between_marks.GRANITE, matches=_has("<|tool_call|>")),
    _pythonic("pythonic", marks=pythonic.LLAMA, matches=pythonic.matches_llama),
    ToolFormat("llama3_json", llama3.LlamaParser, llama3.matches, llama3.shape, (llama3.MARK,)),
    ToolFormat("json", generic.GenericParser, lambda template: True, generic.shape),  # matches every template
)
TOOL_PARSERS = {tool_format.name: tool_format for tool_format in _FORMATS}
_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "glm": "glm45",
    "glm4_moe": "glm45",
    "poolside": "glm47",
    "minimax": "minimax_m2",
    "minimax-m2": "minimax_m2",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "openai": "gpt_oss",
    "gpt-oss": "gpt_oss",
    "harmony": "gpt_oss",
    "kimi": "kimi_k2",
    "gemma4": "gemma",
    "functiongemma": "function_gemma",
    "phi4_mini_json": "phi4_functools",
    "firefunction": "phi4_functools",
    "jamba": "apriel",
    "granite3": "granite",
    "llama4_pythonic": "pythonic",
    "llama4": "pythonic",
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
