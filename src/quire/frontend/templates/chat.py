"""A conversation to the text of a prompt, through the model's own chat template.

Messages are checked and copied into plain JSON types, in the form that the template understands
(template_traits.py): content as a string or as text parts, arguments of tool calls as objects or as JSON.
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

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which clients send it, best first
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

    Encode it with add_special_tokens=False: the template writes special tokens itself.

    Args:
        continue_final_message: the text ends inside the last message, which the model continues.
        template_kwargs: further variables for the template, such as enable_thinking.
        chat_template: a template that replaces the model's.

    Raises:
        RequestError: for wrong messages, and for those that the template refuses or cannot render.
        Overloaded: if no process is free to render them.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: set only one to true"
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
    """Return the model's chat template. Some models have another one for requests with tools."""
    named = tokenizer.chat_templates
    source = (named.get("tool_use") if with_tools else None) or named.get("default")
    if not source:
        raise RequestError(
            "this model has no chat template: send a plain prompt to the completions endpoint, "
            "or give a template with the chat_template setting"
        )
    return source


def _check_kwargs(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise RequestError("chat_template_kwargs must be an object")
    for name in _RESERVED:
        if given and name in given:
            raise RequestError(f"chat_template_kwargs must not hold {name!r}, which has a field of its own")
    return given or {}


# -------------------------------------------------------------------- continuing the last message


def _mark_end(message: dict[str, Any], mark: str) -> str:
    """Put `mark` behind the last word of a message; searching for the text itself would also find it in markup.

    Returns the white space that comes after the mark.
    """
    content = message.get("content")
    if isinstance(content, str) and (content or "tool_calls" not in message):
        message["content"], space = _marked(content, mark)
    elif isinstance(content, list) and content:
        content[-1]["text"], space = _marked(content[-1]["text"], mark)
    else:
        raise RequestError("continue_final_message needs a last message with text")
    return space


def _marked(text: str, mark: str) -> tuple[str, str]:
    words = text.rstrip()
    space = text[len(words) :]
    return words + mark + space, space


def _cut_at(text: str, mark: str, space: str) -> str:
    """Cut `text` where the last message ends: behind its white space, unless the template trims that."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise RequestError("continue_final_message needs a last message whose text the chat template keeps")
    return before + space if after.startswith(space) else before


# ------------------------------------------------------------------------------- checking messages


def check_messages(
    messages: Any, traits: TemplateTraits, knows_developer: bool = False
) -> list[dict[str, Any]]:
    """Return the messages as plain data in the form that a template with `traits` reads.

    Args:
        knows_developer: the template has the role `developer`; else such messages are `system` messages.

    Raises:
        RequestError: names the message that is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("messages must be a list of at least one message")
    found: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        plain = _check_message(message, f"messages[{i}]", knows_developer)
        found += _fit_message(plain, f"messages[{i}]", traits)
    return found


def _check_message(message: Any, where: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string such as user or assistant, got {str(role)[:64]!r}")
    # A field that a client sends as null is a field not sent: templates ask `is defined`.
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    if role == "developer" and not knows_developer:
        plain["role"] = "system"
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    if (
        plain.get("content") is None
        and role != "assistant"
        and not plain.keys() & {"tool_calls", "function_call"}
    ):
        raise RequestError(f"{where}.content is missing")
    return plain


def _fit_message(message: dict[str, Any], where: str, traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return a checked message as the template reads it: one message, or two if it prints only text or calls."""
    content = _fit_content(message.get("content") or "", message["role"], where, traits)
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
    """Return content as a string or as text parts, whichever the template reads in messages of `role`."""
    if isinstance(content, str):
        return _in_form([content], traits.text.get(role, "string")) if content else content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of text parts")
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
        raise RequestError(f"{where} has type {str(kind)[:64]!r}; Quire takes parts of type text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.{kind} must be a string")
    return text


def _fit_calls(calls: Any, where: str, traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return calls with arguments as the template reads them. Clients send a JSON string or an object."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}] must have a function with a name")
        given = function.get("arguments")
        function["arguments"] = _fit_arguments(
            {} if given is None else given, f"{where}[{i}].function.arguments", traits
        )
    return calls


def _fit_arguments(given: Any, where: str, traits: TemplateTraits) -> Any:
    try:
        found = json.loads(given.strip() or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} must be valid JSON: {error}") from error
    found = _plain(found, where)
    return found if traits.arguments == "object" else json.dumps(found, ensure_ascii=False)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON types alone, which a template can read and nothing more."""
    if depth > 64:
        raise RequestError(f"{where} is nested more than 64 deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # a subclass, such as an enum, may carry methods
            return kind(value) if kind is not str else str.__str__(value)
    raise RequestError(f"{where} must hold JSON values, got {type(value).__name__}")
