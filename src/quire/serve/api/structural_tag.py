"""Structural tags, as vLLM and SGLang take them: free text in which a trigger starts a tagged JSON value."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from quire.serve.answer.tools.call_grammar import LarkGrammar
from quire.serve.http.errors import bad_request

_MAX_TAGS = 1024
_SHAPE = (
    '{"structures": [{"begin": text, "schema": JSON schema, "end": text}], "triggers": [text]}; each begin must start '
    "with a trigger"
)


class _Tag(NamedTuple):
    begin: str
    schema: dict[str, Any] | bool
    end: str


def structural_tag_grammar(value: Any, field: str) -> str:
    """Return a structural tag as a Lark grammar.

    Args:
        value: the tag, as an object or its JSON text: `structures` and `triggers`, or `format` with the type
            `triggered_tags`.
        field: the request field that holds it, for errors.

    Raises:
        ApiError: 400 for a malformed tag.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_request(f"{field}: structural_tag is not valid JSON", field) from None
    tags, triggers = _tags(value), _triggers(value)
    if not tags or not triggers or max(len(tags), len(triggers)) > _MAX_TAGS:
        raise bad_request(f"{field}: structural_tag must be {_SHAPE}", field)
    lark = LarkGrammar({})
    segments = []
    for number, trigger in enumerate(triggers):
        started = [tag for tag in tags if tag.begin.startswith(trigger)]
        rests = " | ".join(
            " ".join(
                part
                for part in (
                    lark.literal(tag.begin.removeprefix(trigger)),
                    f"%json {json.dumps(tag.schema)}",
                    lark.literal(tag.end),
                )
                if part
            )
            for tag in started
        )
        if started:
            lark.add(f"tagged_{number}: {rests}")
            segments.append(f"{lark.up_to(f'free_{number}', trigger)} tagged_{number}")
    if any(not any(tag.begin.startswith(trigger) for trigger in triggers) for tag in tags):
        raise bad_request(f"{field}: structural_tag must be {_SHAPE}", field)
    return lark.text(f"({' | '.join(segments)})* TEXT")


def _tags(value: Any) -> list[_Tag]:
    """Return the tags, or [] if the value is malformed."""
    if not isinstance(value, dict):
        return []
    form = value.get("format")
    given = form.get("tags") if isinstance(form, dict) else value.get("structures")
    tags = []
    for tag in given if isinstance(given, list) else []:
        if not isinstance(tag, dict):
            return []
        content = tag.get("content")
        schema = content.get("json_schema") if isinstance(content, dict) else tag.get("schema")
        begin, end = tag.get("begin"), tag.get("end", "")
        if not isinstance(schema, (dict, bool)) or not isinstance(begin, str) or not isinstance(end, str):
            return []
        tags.append(_Tag(begin, schema, end))
    return tags


def _triggers(value: dict[str, Any]) -> list[str]:
    form = value.get("format")
    given = form.get("triggers") if isinstance(form, dict) else value.get("triggers")
    if not isinstance(given, list) or not all(isinstance(text, str) and text for text in given):
        return []
    return list(dict.fromkeys(given))
