"""The form of an answer: how its text is to be read, and what text is allowed, from one look at a request.

Both belong together: a grammar that makes calls must make them in the shape that the parser reads, and behind
a thought if the prompt began one.

    tool_choice      text of the answer                                   calls come out
    none             as `response_format` has it, or free                 never
    auto             free; calls, or as `response_format` has it          when complete
    auto, strict     free, but what begins as a call is one               while they are written
    required, named  calls                                                while they are written
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.serve.answer.parser import PlainText, TextParser
from quire.serve.answer.reasoning import Thought, ThoughtParser, choose_thought, thought_tokens
from quire.serve.answer.tools.grammar import Lark, after_thought, calls, constrained, text_with_calls
from quire.serve.answer.tools.registry import ToolFormat, choose_format
from quire.serve.answer.tools.request import ToolUse
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.http.errors import bad_request
from quire.types import SamplingParams, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class AnswerForm:
    make_parser: Callable[[], TextParser]  # one for each choice
    constraint: StructuredOutputsParams | None = None
    thought_tokens: Callable[[list[int]], int] | None = None  # of an answer's; None: no thoughts are read
    show_special: bool = False  # special tokens are part of the text, for the parser needs them

    def params(self, params: SamplingParams) -> SamplingParams:
        """`params` as the engine gets them."""
        skip = params.skip_special_tokens and not self.show_special
        return replace(params, structured_outputs=self.constraint, skip_special_tokens=skip)


@dataclass(frozen=True, slots=True)
class Forms:
    """What a server knows about its model's answers. The names are those of settings: auto, none, or a parser."""

    tokenizer: Tokenizer
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    eager: bool = False  # calls that no grammar guards come out while they are written, too

    def of(
        self,
        chat: ChatRequest,
        use: ToolUse,
        template: str,
        prompt: str,
        wanted: StructuredOutputsParams | None,
    ) -> AnswerForm:
        """The form of the answers to `prompt`, which `template` made of the chat; `wanted`: structured output that
        the request asks for. Raises ApiError 400 for what excludes each other."""
        tools = choose_format(self.tool_parser, template) if use.choice != "none" else None
        if use.forced:
            _check_forced(use, tools, wanted)
        thought = choose_thought(self.reasoning_parser, template)
        if chat.separate_reasoning is False or (wanted is not None and wanted.grammar is not None):
            thought = None
        inside = thought is not None and thought.opened_by(prompt)
        special = self._special(tools, thought)
        constraint = wanted
        if tools is not None or inside:
            constraint = _constraint(use, tools, thought, inside, prompt, wanted, Lark(special), template)
        guarded = constraint is not None and use.choice != "none"

        def make_parser() -> TextParser:
            inner: TextParser = PlainText()
            if tools is not None:
                names = frozenset(function.name for function in use.functions)
                inner = tools.make_parser(names, not (guarded or self.eager), use.single)
            return inner if thought is None else ThoughtParser(thought, inside, inner)

        counter = None
        if thought is not None:
            counter = partial(thought_tokens, thought, inside, self.tokenizer)
        return AnswerForm(make_parser, constraint, counter, bool(special))

    def _special(self, tools: ToolFormat | None, thought: Thought | None) -> dict[str, int]:
        """The marks that are special tokens of the model's."""
        marks = [*(tools.marks if tools else ()), *((thought.begin, thought.end) if thought else ())]
        found = {mark: self.tokenizer.token_id(mark) for mark in marks}
        return {
            mark: token
            for mark, token in found.items()
            if token is not None and self.tokenizer.is_special(token)
        }


def _check_forced(use: ToolUse, tools: ToolFormat | None, wanted: StructuredOutputsParams | None) -> None:
    if tools is None:
        raise bad_request(
            "tool_choice must be none or auto: this server reads no calls of tools (--tool-call-parser none)",
            "tool_choice",
        )
    if wanted is not None:
        raise bad_request(
            "tool_choice asks for a call of a tool, which excludes response_format and structured_outputs",
            "tool_choice",
        )


def _constraint(
    use: ToolUse,
    tools: ToolFormat | None,
    thought: Thought | None,
    inside: bool,
    prompt: str,
    wanted: StructuredOutputsParams | None,
    lark: Lark,
    template: str,
) -> StructuredOutputsParams | None:
    """What the whole text must be, thought and calls included; None: anything."""
    body = None
    if wanted is not None:
        body = constrained(lark, wanted)
        if body is None:
            if tools is None:
                return wanted
            raise bad_request(
                "structured_outputs.grammar excludes tools: set tool_choice to none", "structured_outputs"
            )
    if tools is not None:
        shape = tools.shape(template, use.single)
        if use.forced:
            body = calls(lark, shape, use, exact=True)
        elif body is not None:
            body = f"{calls(lark, shape, use, exact=False)} | {body}"
        elif any(function.strict for function in use.functions):
            body = text_with_calls(lark, shape, use)
    if body is None:
        return None
    if thought is not None and not thought.closed_by(prompt):
        body = after_thought(lark, thought, inside, body)
    return StructuredOutputsParams(grammar=lark.text(body))
