"""How a chat template reads messages, found by rendering small conversations and looking for their words.

Templates disagree: some print the calls of a message only if its content is null, some concatenate
arguments as a string, some read only lists of parts. Each would silently drop what comes in another form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Render = Callable[[dict[str, Any]], str]
Message = dict[str, Any]
ContentForm = Literal["string", "part", "parts"]
EmptyContent = Literal["empty", "null", "absent"]

ROLES = ("system", "user", "assistant", "tool")
_NAME, _KEY, _VALUE, _RESULT, _WORDS = "probe_lookup", "probe_city", "Zanzibar", "probe_sunny", "probe_words"
_CALL_ID = "abcdefghi"  # Mistral's templates take nine letters or digits
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "other_tool",
            "description": "Another tool.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
        },
    }
]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template understands."""

    text: dict[str, ContentForm] = field(
        default_factory=dict
    )  # by role: how it reads a string; default string
    parts: dict[str, ContentForm] = field(default_factory=dict)  # by role: how it reads several parts
    empty: EmptyContent = "empty"  # content of a message that holds calls alone
    arguments: Literal["object", "string"] = "object"
    splits_calls: bool = False  # it prints either the text of a message or its calls, not both


def probe_traits(render: Render) -> TemplateTraits:
    """Find the traits of the template that `render` renders with the given variables."""
    text: dict[str, ContentForm] = {}
    parts: dict[str, ContentForm] = {}
    for role in ROLES:
        text[role], parts[role] = _content_forms(render, role)
    empty, arguments = _call_forms(render)
    return TemplateTraits(text, parts, empty, arguments, _splits_calls(render, empty, arguments))


def _try(render: Render, messages: Sequence[Message], tools: bool = False) -> str:
    """Render a conversation; an empty text if the template does not take it."""
    variables = {
        "messages": list(messages),
        "tools": _TOOLS if tools else None,
        "documents": None,
        "add_generation_prompt": False,
        "bos_token": "",
        "eos_token": "",
    }
    try:
        return render(variables)
    except MemoryError:
        raise
    except Exception:
        return ""


# --------------------------------------------------------------------------------------- content


def _content_forms(render: Render, role: str) -> tuple[ContentForm, ContentForm]:
    """Return how a string, and how several parts, are passed as the content of a message of `role`."""
    whole, one, two = "probe_a probe_b", [_part("probe_a probe_b")], [_part("probe_a"), _part("probe_b")]
    reads_string, reads_part, reads_parts = (
        _shows_words(_try(render, _conversation(role, content))) for content in (whole, one, two)
    )
    text: ContentForm = "part" if reads_part and not reads_string else "string"
    return text, "parts" if reads_parts else text


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _shows_words(text: str) -> bool:
    """Whether both words are there, not as a list's representation in Python or JSON."""
    printed = any(f"{quote}text{quote}: {quote}probe_a" in text for quote in ("'", '"'))
    return "probe_a" in text and "probe_b" in text and not printed


def _conversation(role: str, content: Any) -> list[Message]:
    """A conversation in which one message of `role` has this content."""
    said: Message = {"role": role, "content": content}
    user: Message = {"role": "user", "content": "Hi"}
    match role:
        case "system":
            return [said, user]
        case "user":
            return [said]
        case "assistant":
            return [user, said, user]
    return [user, _call({"content": ""}, {_KEY: _VALUE}), {**said, "tool_call_id": _CALL_ID, "name": _NAME}]


# ----------------------------------------------------------------------------------------- calls


def _call(content: Message, arguments: Any) -> Message:
    function = {"name": _NAME, "arguments": arguments}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", **content, "tool_calls": calls}


def _with_call(*assistant: Message) -> list[Message]:
    """A conversation around the messages of the assistant, the last of which calls a tool."""
    return [
        {"role": "user", "content": "Hi"},
        *assistant,
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _RESULT},
        {"role": "assistant", "content": "Done"},  # some templates count turns
        {"role": "user", "content": "Thanks"},
    ]


_CONTENTS: dict[EmptyContent, Message] = {"empty": {"content": ""}, "null": {"content": None}, "absent": {}}
_ARGUMENTS: dict[Literal["object", "string"], Any] = {
    "object": {_KEY: _VALUE},
    "string": f'{{"{_KEY}": "{_VALUE}"}}',
}


def _call_forms(render: Render) -> tuple[EmptyContent, Literal["object", "string"]]:
    """Return the forms with which call and result show best; the first ones if none does."""
    forms = list(itertools.product(_CONTENTS, _ARGUMENTS))
    scores = {
        (empty, arguments): _score(
            _try(render, _with_call(_call(_CONTENTS[empty], _ARGUMENTS[arguments])), tools=True)
        )
        for empty, arguments in forms
    }
    return max(forms, key=scores.__getitem__)


def _score(text: str) -> tuple[int, int, int]:
    """Rate a rendered call: what it shows, then how often, then how well it is written."""
    counts = [text.count(word) for word in (_NAME, _KEY, _VALUE, _RESULT)]
    # JSON within JSON, an object as Python prints it, and a content that should not be printed.
    flaws = text.count(f'\\"{_KEY}') + text.count(f"'{_KEY}'") + text.count("None") + text.count("null")
    return sum(map(bool, counts)), -sum(count > 1 for count in counts), -flaws


def _splits_calls(render: Render, empty: EmptyContent, arguments: Literal["object", "string"]) -> bool:
    given = _ARGUMENTS[arguments]
    words: Message = {"role": "assistant", "content": _WORDS}
    together = _try(render, _with_call(_call({"content": _WORDS}, given)), tools=True)
    if _KEY in together and _NAME in together:
        return False
    apart = _try(render, _with_call(words, _call(_CONTENTS[empty], given)), tools=True)
    return all(word in apart for word in (_WORDS, _NAME, _KEY))
