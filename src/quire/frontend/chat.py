"""A conversation to the text of a prompt, through the model's own chat template.

Messages are checked and copied into plain JSON types first, so that a template sees exactly what it
expects: content as one string or as a list of text parts, arguments of tool calls as objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import jinja2
from jinja2 import nodes

from quire.frontend.sandbox import parse_template, run_template
from quire.frontend.tokenizer import Tokenizer
from quire.types import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ContentFormat = Literal["string", "openai", "parts"]
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which clients send it, best first
_RESERVED = ("messages", "tools", "add_generation_prompt")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
) -> str:
    """The prompt text of a conversation. Encode it with add_special_tokens=False: the template has its own.

    `chat_template` replaces the model's; `template_kwargs` are further variables for it, such as
    enable_thinking. With `continue_final_message` the text ends inside the last message.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: set only one to true"
        )
    source = chat_template or template_of(tokenizer, bool(tools))
    chat = check_messages(messages, content_format(source))
    variables: dict[str, Any] = {
        **tokenizer.special_tokens,
        **_plain(_check_kwargs(template_kwargs), "chat_template_kwargs"),
        "messages": chat,
        "tools": _plain(list(tools), "tools") if tools else None,
        "documents": _plain(list(documents), "documents") if documents else None,
        "add_generation_prompt": add_generation_prompt,
    }
    text = run_template(source, variables)
    return _cut_after_last(text, chat[-1]) if continue_final_message else text


def template_of(tokenizer: Tokenizer, with_tools: bool) -> str:
    """The model's chat template; some have another one for when there are tools."""
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


def _cut_after_last(text: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1].get("text") if content else None
    core = content.strip() if isinstance(content, str) else ""
    at = text.rfind(core)
    if not core or at < 0:
        raise RequestError(
            "continue_final_message needs a last message with text that the chat template keeps"
        )
    tail = content[len(content.rstrip()) :] if isinstance(content, str) else ""
    end = at + len(core)
    return text[: end + len(tail)] if text.startswith(tail, end) else text[:end]


# ------------------------------------------------------------------------------- checking messages


def check_messages(messages: Any, form: ContentFormat) -> list[dict[str, Any]]:
    """The messages as plain data in the form that the template reads; RequestError names the one that is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("messages must be a list of at least one message")
    return [_check_message(message, f"messages[{i}]", form) for i, message in enumerate(messages)]


def _check_message(message: Any, where: str, form: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content")
    if message.get("role") not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {message.get('role')!r}")
    # A field that a client sends as null is a field not sent: templates ask `is defined`.
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    calls = plain.get("tool_calls")
    if calls is not None:
        plain["tool_calls"] = _check_tool_calls(calls, f"{where}.tool_calls")
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    content = plain.get("content")
    if content is None:
        if plain["role"] != "assistant" and not ("tool_calls" in plain or "function_call" in plain):
            raise RequestError(f"{where}.content is missing")
        content = ""  # templates write None, or fail at it
    plain["content"] = _check_content(content, where, form)
    reasoning = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _check_content(content: Any, where: str, form: ContentFormat) -> Any:
    if isinstance(content, str) and form == "parts":
        return [{"type": "text", "text": content}]
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of text parts")
    texts = [_check_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return "\n".join(texts) if form == "string" else [{"type": "text", "text": text} for text in texts]


def _check_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise RequestError(f"{where} has type {kind!r}; Quire takes parts of type text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.{kind} must be a string")
    return text


def _check_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI clients send arguments as a JSON string; templates want the object."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}] must have a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{where}[{i}].function.arguments must be valid JSON: {error}") from error
    return calls


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


# ------------------------------------------------------------------------ what a template can read


@lru_cache(maxsize=32)
def content_format(source: str) -> ContentFormat:
    """openai for a template that loops over the parts of a message's content (parts, if it takes no
    string beside them), else string."""
    try:
        tree = parse_template(source)
    except (jinja2.TemplateError, RecursionError):
        return "string"  # compiling it will say what is wrong
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _reads_content(assign.node, set()):
            aliases.add(assign.target.name)
    for macro in tree.find_all(nodes.Macro):
        aliases.update(arg.name for arg in macro.args if "content" in arg.name)
    loops = tree.find_all(nodes.For)
    if not any(_reads_content(loop.iter, aliases) for loop in loops):
        return "string"
    asks = any(test.name in ("string", "iterable", "sequence") for test in tree.find_all(nodes.Test))
    return "openai" if asks else "parts"


def _reads_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    """Whether `node` is the content of something, in one of the ways to write that, or a name that stands for it."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        return bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in aliases
