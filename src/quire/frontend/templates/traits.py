"""Probe how a chat template reads messages, by rendering small conversations and searching for their words.

Templates disagree: some print the tool calls of a message only if its content is null, some concatenate arguments as a
string, some read only lists of parts. Each silently drops content in any other form.
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
    """The forms in which a template reads messages.

    `text` and `parts` say by role how to pass a string and a list of several parts; a missing role takes a string.
    `empty` is the content of a message that has only tool calls. `arguments` is the form of the arguments of a call.
    `splits_calls`: the template prints either the text of a message or its calls, so both need separate messages.
    """

    text: dict[str, ContentForm] = field(default_factory=dict)
    parts: dict[str, ContentForm] = field(default_factory=dict)
    empty: EmptyContent = "empty"
    arguments: Literal["object", "string"] = "object"
    splits_calls: bool = False


def probe_traits(render: Render) -> TemplateTraits:
    """Return the traits of a template, given a function that renders it with some variables."""
    text: dict[str, ContentForm] = {}
    parts: dict[str, ContentForm] = {}
    for role in ROLES:
        text[role], parts[role] = _content_forms(render, role)
    empty, arguments = _call_forms(render)
    return TemplateTraits(text, parts, empty, arguments, _splits_calls(render, empty, arguments))


def _try(render: Render, messages: Sequence[Message], tools: bool = False) -> str:
    """Render a conversation. Return an empty text if the template fails on it."""
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
    """Return the forms in which a template reads a string, and several parts, in a message of this role."""
    whole, one, two = "probe_a probe_b", [_part("probe_a probe_b")], [_part("probe_a"), _part("probe_b")]
    reads_string, reads_part, reads_parts = (
        _shows_words(_try(render, _conversation(role, content))) for content in (whole, one, two)
    )
    text: ContentForm = "part" if reads_part and not reads_string else "string"
    return text, "parts" if reads_parts else text


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _shows_words(text: str) -> bool:
    """Return whether a text has both words, but not in the Python or JSON representation of a list."""
    printed = any(f"{quote}text{quote}: {quote}probe_a" in text for quote in ("'", '"'))
    return "probe_a" in text and "probe_b" in text and not printed


def _conversation(role: str, content: Any) -> list[Message]:
    """Build a conversation in which one message of this role has this content."""
    probe: Message = {"role": role, "content": content}
    user: Message = {"role": "user", "content": "Hi"}
    match role:
        case "system":
            return [probe, user]
        case "user":
            return [probe]
        case "assistant":
            return [user, probe, user]
    return [user, _call({"content": ""}, {_KEY: _VALUE}), {**probe, "tool_call_id": _CALL_ID, "name": _NAME}]


# ----------------------------------------------------------------------------------------- calls


def _call(content: Message, arguments: Any) -> Message:
    function = {"name": _NAME, "arguments": arguments}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", **content, "tool_calls": calls}


def _with_call(*assistant: Message) -> list[Message]:
    """Build a conversation around assistant messages, the last of which calls a tool."""
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
    """Return the forms that render a tool call and its result best, by `_score`; on a tie the first ones."""
    forms = list(itertools.product(_CONTENTS, _ARGUMENTS))
    scores = {
        (empty, arguments): _score(
            _try(render, _with_call(_call(_CONTENTS[empty], _ARGUMENTS[arguments])), tools=True)
        )
        for empty, arguments in forms
    }
    return max(forms, key=scores.__getitem__)


def _score(text: str) -> tuple[int, int, int]:
    """Score a rendered call by what it shows, then by repetitions, then by flaws. Higher is better."""
    counts = [text.count(word) for word in (_NAME, _KEY, _VALUE, _RESULT)]
    # JSON inside JSON, a Python representation, or null content that is printed.
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
