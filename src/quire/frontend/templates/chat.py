"""Render a conversation as the text of a prompt, through a chat template.

Messages are checked and copied into plain JSON types, in the form that the template reads (traits.py): content as a
string or as text parts, arguments of tool calls as objects or as JSON text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.templates.renderer import TemplateRenderer
from quire.frontend.templates.traits import ContentForm, TemplateTraits
from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.types import RequestError

_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # fields in which clients send reasoning, in this order
_RESERVED = ("messages", "tools", "add_generation_prompt")
_EMPTY: dict[str, dict[str, Any]] = {"empty": {"content": ""}, "null": {"content": None}, "absent": {}}


def render_chat(
    renderer: TemplateRenderer,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
) -> str:
    """Render a conversation as the text of a prompt.

    Encode the text with add_special_tokens=False, because the template writes special tokens itself.

    Args:
        renderer: runs the template.
        tokenizer: provides the model's template and the texts of its special tokens.
        messages: the conversation, as mappings with `role` and `content`.
        tools: function definitions in OpenAI's format.
        add_generation_prompt: end the text with the header of a new assistant message.
        continue_final_message: end the text inside the last message, so that the model continues it.
        template_kwargs: further variables for the template, such as enable_thinking.
        documents: documents for templates that support retrieval.
        chat_template: a template that replaces the model's.

    Raises:
        RequestError: if a message is invalid, or the template is missing, refuses the messages or cannot render them.
        Overloaded: if no process is free to render the template.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: set only one to true",
            param="continue_final_message",
        )
    source = chat_template or template_of(tokenizer, bool(tools))
    chat = check_messages(messages, renderer.traits(source), "developer" in source)
    mark = f"END-OF-FINAL-MESSAGE-{secrets.token_hex(8)}"
    space = _mark_end(chat[-1], mark) if continue_final_message else ""
    variables: dict[str, Any] = {
        **tokenizer.special_tokens,
        **_plain(_check_kwargs(template_kwargs), "chat_template_kwargs"),
        "messages": chat,
        "tools": _plain(list(tools), "tools") if tools else None,
        "documents": _plain(list(documents), "documents") if documents else None,
        "add_generation_prompt": add_generation_prompt,
    }
    text = renderer.render(source, variables)
    return _cut_at(text, mark, space) if continue_final_message else text


def template_of(tokenizer: Tokenizer, with_tools: bool) -> str:
    """Return the model's chat template. Some models have a separate one for requests with tools.

    Raises:
        RequestError: if the model has no chat template.
    """
    named = tokenizer.chat_templates
    source = (named.get("tool_use") if with_tools else None) or named.get("default")
    if not source:
        raise RequestError(
            "this model has no chat template: send a plain prompt to the completions endpoint, "
            "or give a template with the chat_template setting",
            param="messages",
        )
    return source


def _check_kwargs(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(
            f"chat_template_kwargs must be an object, got {type(given).__name__}",
            param="chat_template_kwargs",
        )
    for name in _RESERVED:
        if given and name in given:
            raise RequestError(
                f"chat_template_kwargs must not hold {name!r}: use the request field of that name",
                param="chat_template_kwargs",
            )
    return given or {}


# -------------------------------------------------------------------- continuing the last message


def _mark_end(message: dict[str, Any], mark: str) -> str:
    """Insert `mark` after the last word of a message and return the white space that follows it.

    The mark finds the end of the message in the rendered text. The message's own text could also occur elsewhere.
    """
    content = message.get("content")
    if isinstance(content, str) and (content or "tool_calls" not in message):
        message["content"], space = _marked(content, mark)
    elif isinstance(content, list) and content:
        content[-1]["text"], space = _marked(content[-1]["text"], mark)
    else:
        raise RequestError(
            "continue_final_message needs a last message with text", param="continue_final_message"
        )
    return space


def _marked(text: str, mark: str) -> tuple[str, str]:
    words = text.rstrip()
    space = text[len(words) :]
    return words + mark + space, space


def _cut_at(text: str, mark: str, space: str) -> str:
    """Cut `text` at the end of the last message, including its trailing white space unless the template trims it."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise RequestError(
            "continue_final_message needs a last message whose text the chat template keeps",
            param="continue_final_message",
        )
    return before + space if after.startswith(space) else before


# ------------------------------------------------------------------------------- checking messages


def check_messages(
    messages: Any, traits: TemplateTraits, knows_developer: bool = False
) -> list[dict[str, Any]]:
    """Check messages and return them as plain data in the form that a template reads.

    Args:
        messages: the conversation, as the client sent it.
        traits: how the template reads messages.
        knows_developer: whether the template has the role `developer`. If not, `developer` messages become `system`
            messages.

    Raises:
        RequestError: if a message is invalid. The message and `param` name its place, such as messages[2].content.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _error("messages", "must be a list of at least one message")
    checked: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        plain = _check_message(message, f"messages[{i}]", knows_developer)
        checked += _fit_message(plain, f"messages[{i}]", traits)
    return checked


def _error(where: str, reason: str) -> RequestError:
    """Build the refusal of the part of the request at `where`, such as messages[2].content."""
    return RequestError(f"{where} {reason}", param=where)


def _check_message(message: Any, where: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _error(where, f"must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _error(f"{where}.role", f"must be a string such as user or assistant, got {str(role)[:64]!r}")
    # A null field counts as absent, because templates test `is defined`.
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    if role == "developer" and not knows_developer:
        plain["role"] = "system"
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    if (
        plain.get("content") is None
        and role != "assistant"
        and not plain.keys() & {"tool_calls", "function_call"}
    ):
        raise _error(f"{where}.content", "is missing")
    return plain


def _fit_message(message: dict[str, Any], where: str, traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return a checked message in the template's form: one message, or two if it renders either text or calls."""
    given = message.get("content")
    content = _fit_content("" if given in (None, []) else given, message["role"], where, traits)
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if "tool_calls" not in message:
        return [{**message, "content": content}]
    calls = _fit_calls(message["tool_calls"], f"{where}.tool_calls", traits)
    others = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    if not content:
        return [{**others, **_EMPTY[traits.empty], "tool_calls": calls}]
    if traits.splits_calls:
        alone = {"role": message["role"], **_EMPTY[traits.empty], "tool_calls": calls}
        return [{**others, "content": content}, alone]
    return [{**others, "content": content, "tool_calls": calls}]


def _fit_content(content: Any, role: str, where: str, traits: TemplateTraits) -> Any:
    """Return content as a string or as text parts, whichever the template reads for this role."""
    if isinstance(content, str):
        return _in_form([content], traits.text.get(role, "string")) if content else content
    if not isinstance(content, list):
        raise _error(
            f"{where}.content", f"must be a string or a list of text parts, got {type(content).__name__}"
        )
    texts = [_check_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return _in_form(texts, traits.parts.get(role, "string"))


def _in_form(texts: list[str], form: ContentForm) -> Any:
    if form == "parts":
        return [{"type": "text", "text": text} for text in texts]
    joined = "\n".join(texts)
    return joined if form == "string" else [{"type": "text", "text": joined}]


def _check_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise _error(where, f"has type {str(kind)[:64]!r}; Quire takes parts of type text")
    if not isinstance(text, str):
        raise _error(f"{where}.{kind}", f"must be a string, got {type(text).__name__}")
    return text


def _fit_calls(calls: Any, where: str, traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return tool calls with arguments in the template's form. Clients send JSON text or an object."""
    if not isinstance(calls, list):
        raise _error(where, f"must be a list, got {type(calls).__name__}")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _error(f"{where}[{i}]", "must have a function with a name")
        given = function.get("arguments")
        function["arguments"] = _fit_arguments(
            {} if given is None else given, f"{where}[{i}].function.arguments", traits
        )
    return calls


def _fit_arguments(given: Any, where: str, traits: TemplateTraits) -> Any:
    try:
        parsed = json.loads(given.strip() or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise _error(where, f"must be valid JSON: {error}") from error
    arguments = _plain(parsed, where)
    return arguments if traits.arguments == "object" else json.dumps(arguments, ensure_ascii=False)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy made of plain JSON types, which have no methods that a template could misuse."""
    if depth > 64:
        raise _error(where, "is nested more than 64 levels deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # a subclass, such as an enum, may carry methods
            return kind(value) if kind is not str else str.__str__(value)
    raise _error(where, f"must hold JSON values, got {type(value).__name__}")
