"""The form of an answer: the parser of its text and the constraint on it, both chosen from the request.

They belong together: a grammar must write calls in the format that the parser reads, and after the reasoning if the
prompt opened one.

    tool_choice      text of the answer                                   calls are emitted
    none             as in `response_format`, or free                     never
    auto             free; calls, or as in `response_format`              when complete
    auto, strict     free, but text that starts like a call is a call     while they are generated
    required, named  calls                                                while they are generated
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.serve.answer.parser import PlainText, TextParser
from quire.serve.answer.reasoning import (
    ReasoningMarks,
    ReasoningParser,
    choose_reasoning,
    count_reasoning_tokens,
)
from quire.serve.answer.tools.call_grammar import (
    LarkGrammar,
    after_reasoning,
    calls_expression,
    constraint_expression,
    text_with_calls,
)
from quire.serve.answer.tools.formats import ToolFormat, choose_format
from quire.serve.answer.tools.schema_check import check_tool_schemas
from quire.serve.answer.tools.tool_use import ToolUse
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.http.errors import bad_request
from quire.types import SamplingParams, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The parser and the constraint of the answers to one prompt.

    Attributes:
        make_parser: returns a new parser for one choice.
        constraint: what the whole text must be, or None.
        count_reasoning: counts the reasoning tokens among a choice's ids; None if reasoning is not parsed.
        show_special: whether special tokens stay in the text because the parser needs them.
    """

    make_parser: Callable[[], TextParser]
    constraint: StructuredOutputsParams | None = None
    count_reasoning: Callable[[list[int]], int] | None = None
    show_special: bool = False

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the constraint, as the engine gets them."""
        skip = params.skip_special_tokens and not self.show_special
        return replace(params, structured_outputs=self.constraint, skip_special_tokens=skip)


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """The server's settings for the forms of answers. Parsers are named `auto`, `none`, or by their own name."""

    tokenizer: Tokenizer
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    eager: bool = False  # emit calls while they are generated even if no grammar guards them

    def choose(
        self,
        chat: ChatRequest,
        use: ToolUse,
        template: str,
        prompt: str,
        structured: StructuredOutputsParams | None,
    ) -> AnswerForm:
        """Choose the form of the answers to one prompt.

        Args:
            chat: the request.
            use: its tools, checked.
            template: the chat template that rendered the prompt. It shows which format the model writes.
            prompt: the rendered prompt.
            structured: the constraint that the request sets, or None.

        Raises:
            ApiError: 400 for fields that exclude each other.
        """
        tools = choose_format(self.tool_parser, template) if use.choice != "none" else None
        if use.forced:
            _check_forced(use, tools, structured)
        if tools is not None:
            check_tool_schemas(chat, use)
        reasoning = choose_reasoning(self.reasoning_parser, template)
        if chat.separate_reasoning is False or (structured is not None and structured.grammar is not None):
            reasoning = None
        inside = reasoning is not None and reasoning.opened_by(prompt)
        special = self._special(tools, reasoning)
        constraint = structured
        if tools is not None or inside:
            constraint = _constraint(
                use, tools, reasoning, inside, prompt, structured, LarkGrammar(special), template
            )
        guarded = constraint is not None and use.choice != "none"

        def make_parser() -> TextParser:
            inner: TextParser = PlainText()
            if tools is not None:
                names = frozenset(function.name for function in use.functions)
                inner = tools.make_parser(names, not (guarded or self.eager), use.single)
            return inner if reasoning is None else ReasoningParser(reasoning, inside, inner)

        counter = None
        if reasoning is not None:
            counter = partial(count_reasoning_tokens, reasoning, inside, self.tokenizer)
        return AnswerForm(make_parser, constraint, counter, bool(special))

    def _special(self, tools: ToolFormat | None, reasoning: ReasoningMarks | None) -> dict[str, int]:
        """Return the ids of the marks that are special tokens of the model."""
        marks = [*(tools.marks if tools else ()), *((reasoning.begin, reasoning.end) if reasoning else ())]
        ids = {mark: self.tokenizer.token_id(mark) for mark in marks}
        return {
            mark: token
            for mark, token in ids.items()
            if token is not None and self.tokenizer.is_special(token)
        }


def _check_forced(use: ToolUse, tools: ToolFormat | None, structured: StructuredOutputsParams | None) -> None:
    if tools is None:
        raise bad_request(
            "tool_choice must be none or auto: this server parses no tool calls (--tool-call-parser none)",
            "tool_choice",
        )
    if structured is not None:
        raise bad_request(
            "tool_choice forces a tool call, which excludes response_format and structured_outputs",
            "tool_choice",
        )


def _constraint(
    use: ToolUse,
    tools: ToolFormat | None,
    reasoning: ReasoningMarks | None,
    inside: bool,
    prompt: str,
    structured: StructuredOutputsParams | None,
    lark: LarkGrammar,
    template: str,
) -> StructuredOutputsParams | None:
    """Build the constraint on the whole text, reasoning and calls included; None if the text is free."""
    body = None
    if structured is not None:
        body = constraint_expression(lark, structured)
        if body is None:
            if tools is None:
                return structured
            raise bad_request(
                "structured_outputs.grammar cannot be combined with tools: set tool_choice to none",
                "structured_outputs",
            )
    if tools is not None:
        shape = tools.shape(template, use.single)
        if use.forced:
            body = calls_expression(lark, shape, use, exact=True)
        elif body is not None:
            body = f"{calls_expression(lark, shape, use, exact=False)} | {body}"
        elif any(function.strict for function in use.functions):
            body = text_with_calls(lark, shape, use)
    if body is None:
        return None
    if reasoning is not None and not reasoning.closed_by(prompt):
        body = after_reasoning(lark, reasoning, inside, body)
    return StructuredOutputsParams(grammar=lark.text(body))
