"""The form of an answer: the parser of its text and the constraint on it, both chosen from the request.

They belong together: a grammar must write calls in the format that the parser reads, and after the reasoning if the
prompt opened one.

    tool_choice      text of the answer                                   calls are emitted
    none             as in `response_format`, or free                     never
    auto             free; calls, or as in `response_format`              when complete
    auto, strict     free, but text that starts like a call is a call     while they are generated
    required, named  calls; a format applies to later answers             while they are generated
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.serve.answer.parser import PlainText, TextParser
from quire.serve.answer.reasoning import ReasoningMarks, count_reasoning_tokens
from quire.serve.answer.reasoning_formats import choose_reasoning, reasoning_name
from quire.serve.answer.tools.call_grammar import (
    ANY_TEXT,
    LarkGrammar,
    after_reasoning,
    as_content,
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
        ignores_stop: whether stop strings are ignored, because the text is a call that they would cut off.
    """

    make_parser: Callable[[], TextParser]
    constraint: StructuredOutputsParams | None = None
    count_reasoning: Callable[[list[int]], int] | None = None
    show_special: bool = False
    ignores_stop: bool = False

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the constraint, as the engine gets them."""
        skip = params.skip_special_tokens and not self.show_special
        stop = [] if self.ignores_stop else params.stop
        return replace(params, structured_outputs=self.constraint, skip_special_tokens=skip, stop=stop)


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
            _check_forced(tools)
            structured = None  # applies to the text of a later answer
        if tools is not None:
            check_tool_schemas(chat, use)
        reasoning = choose_reasoning(self.reasoning_parser, template)
        if chat.separate_reasoning is False or (structured is not None and structured.grammar is not None):
            reasoning = None
        inside = reasoning is not None and reasoning.opened_by(prompt)
        special = self._special(tools, reasoning)
        constraint = structured
        if tools is not None or inside or (reasoning is not None and _content_marked(reasoning)):
            constraint = _constraint(
                use, tools, reasoning, inside, prompt, structured, LarkGrammar(special), template
            )
        guarded = constraint is not None and use.choice != "none"
        names = frozenset(function.name for function in use.functions)
        schemas = {function.name: function.parameters for function in use.functions}

        def make_calls(hold: bool = True) -> TextParser:
            return PlainText() if tools is None else tools.make_parser(names, hold, use.single, schemas)

        # A grammar closes the reasoning before a call; without one models forget that.
        call_mark = "" if tools is None or guarded else tools.shape(template, use.single).mark

        def make_parser() -> TextParser:
            inner = make_calls(hold=not (guarded or self.eager))
            return inner if reasoning is None else reasoning.make_parser(inside, inner, call_mark, make_calls)

        counter = None
        if reasoning is not None:
            counter = partial(count_reasoning_tokens, reasoning, inside, self.tokenizer)
        return AnswerForm(make_parser, constraint, counter, bool(special), use.forced)

    def report(self, template: str) -> tuple[str, bool]:
        """Return which formats are used with a chat template and why, and whether that of calls is a guess."""
        by_template = "from the chat template"
        tools = choose_format(self.tool_parser, template)
        guess = self.tool_parser == "auto" and tools is not None and tools.name == "json"
        if guess:
            why = "a guess: the chat template shows no known format"
        else:
            why = by_template if self.tool_parser == "auto" else "from --tool-call-parser"
        name = reasoning_name(self.reasoning_parser, template)
        origin = by_template if self.reasoning_parser == "auto" else "from --reasoning-parser"
        return f"tool calls: {tools.name if tools else 'none'} ({why}); reasoning: {name} ({origin})", guess

    def _special(self, tools: ToolFormat | None, reasoning: ReasoningMarks | None) -> dict[str, int]:
        """Return the ids of the marks that are special tokens of the model."""
        marks = [*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ())]
        ids = {mark: self.tokenizer.token_id(mark) for mark in marks}
        return {
            mark: token
            for mark, token in ids.items()
            if token is not None and self.tokenizer.is_special(token)
        }


def _check_forced(tools: ToolFormat | None) -> None:
    if tools is None:
        raise bad_request(
            "tool_choice must be none or auto: this server parses no tool calls (--tool-call-parser none)",
            "tool_choice",
        )


def _content_marked(reasoning: ReasoningMarks) -> bool:
    """Return whether the model always writes marks around its content."""
    return bool(reasoning.content_begin) and not reasoning.optional_content


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
        if reasoning is not None and _content_marked(reasoning):
            body = as_content(lark, reasoning, body)
    if tools is not None:
        shape = tools.shape(template, use.single)
        if use.forced:
            body = calls_expression(lark, shape, use, exact=True)
        elif body is not None:
            body = f"{calls_expression(lark, shape, use, exact=False)} | {body}"
        elif any(function.strict for function in use.functions):
            body = text_with_calls(lark, shape, use)
            if reasoning is not None and _content_marked(reasoning):
                calls = calls_expression(lark, shape, use, exact=False)
                body = f"{as_content(lark, reasoning, ANY_TEXT)} | {calls}"
    if body is None:
        return None
    if reasoning is not None and not reasoning.closed_by(prompt):
        body = after_reasoning(lark, reasoning, inside, body)
    grammar = lark.text(body)
    if structured is None:
        return StructuredOutputsParams(grammar=grammar)
    return replace(structured, json=None, json_object=False, regex=None, choice=None, grammar=grammar)
