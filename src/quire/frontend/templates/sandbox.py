"""The Jinja environment in which chat templates run. A template comes with a checkpoint: it is not trusted.

Jinja's immutable sandbox keeps a template from Python's internals and from changing its input. Nothing here
bounds its time or memory: no check in Python can interrupt C code. The kernel does that, to the helper
process that runs this module (template_process.py).
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

MAX_CHARS = 16_000_000  # of a rendered text
_MAX_REASON_CHARS = 500


class TemplateFailure(Exception):
    """A sentence that says why a template gives no text for these messages."""


class TemplateRefusal(jinja2.TemplateError):
    """`raise_exception` in a template: the conversation is not one that the model takes."""


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own turns for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """`namespace()`, without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it stores the private name {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as chat templates expect it: no HTML escapes, and characters beyond ASCII unescaped."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Names,
    }
    return env


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Raises TemplateFailure, which says where its syntax is wrong."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailure(
            f"the chat template is not valid Jinja (line {error.lineno}): {_cut(error.message or '')}"
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise TemplateFailure(f"the chat template cannot be compiled: {_cut(str(error))}") from error


def run_template(source: str, variables: dict[str, Any]) -> str:
    """Render a template. Raises TemplateFailure for whatever goes wrong in it, and MemoryError."""
    template = compile_template(source)
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(variables):
            size += len(part)
            if size > MAX_CHARS:
                raise SecurityError(f"it writes more than {MAX_CHARS} characters")
            parts.append(part)
    except TemplateRefusal as error:
        raise TemplateFailure(f"the chat template refuses these messages: {_cut(str(error))}") from error
    except SecurityError as error:
        raise TemplateFailure(f"the chat template was stopped: {_cut(str(error))}") from error
    except MemoryError:
        raise
    except Exception as error:  # a template can make any expression fail
        reason = _cut(str(error)) or type(error).__name__
        raise TemplateFailure(f"the chat template failed on these messages: {reason}") from error
    return "".join(parts)


def _cut(reason: str) -> str:
    return reason[:_MAX_REASON_CHARS]
