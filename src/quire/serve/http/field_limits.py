"""Limits of request fields as JSON Schema keywords, for the OpenAPI description.

They are read from the tables that requests are validated with, so the description matches the validation. Limits that
depend on the model (vocabulary size, context length) or on other fields are not included.
"""

from __future__ import annotations

from typing import Any

from quire.serve.api.sampling_fields import REFUSED
from quire.types import FLOAT_RANGES, INT_RANGES

_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array"}]},
    },
}
_COUNTS = {"minimum": 1, "maximum": 2**31 - 1}
_LIMITS: dict[str, dict[str, Any]] = {
    **{name: {"minimum": low, "maximum": high} for name, low, high in INT_RANGES},
    **{
        name: {"exclusiveMinimum" if is_open else "minimum": low, "maximum": high}
        for name, low, high, is_open in FLOAT_RANGES
    },
    "max_completion_tokens": _COUNTS,
    "max_output_tokens": _COUNTS,
    "max_new_tokens": _COUNTS,
    "timeout": {"exclusiveMinimum": 0, "maximum": 1e6},
    "target_itl": {"exclusiveMinimum": 0, "maximum": 1e6},
    "target_ttft": {"exclusiveMinimum": 0, "maximum": 1e6},
    "priority": {"minimum": -(2**31), "maximum": 2**31},
    "request_id": {"minLength": 1, "maxLength": 128},
    "cache_salt": {"minLength": 1, "maxLength": 1024},
    "messages": {"minItems": 1, "items": _MESSAGE},
}
_TYPES = {"minimum": ("integer", "number"), "exclusiveMinimum": ("number",), "minLength": ("string",), "minItems": ("array",)}  # fmt: skip


def narrow(components: dict[str, Any]) -> None:
    """Add the limits to the request schemas in `components`, in place."""
    for name, schema in components.items():
        if not name.endswith(("Request", "Options")):
            continue
        for field, described in schema["properties"].items():
            if field in REFUSED:
                schema["properties"][field] = {"enum": [None, *REFUSED[field]], "default": None}
            elif field in _LIMITS:
                _add(described, _LIMITS[field])


def _add(described: dict[str, Any], limits: dict[str, Any]) -> None:
    """Add `limits` to the alternatives of a schema that have the right type; null, for instance, has no limits."""
    (types,) = (_TYPES[keyword] for keyword in limits if keyword in _TYPES)
    for branch in described.get("anyOf", [described]):
        if branch.get("type") in types:
            branch.update(limits)
