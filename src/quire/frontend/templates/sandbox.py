"""The Jinja environment of chat templates, which come with a checkpoint or a request and are not trusted.

Jinja's immutable sandbox keeps a template away from Python's internals and from changing its input. Time and memory are
not limited here, because Python cannot interrupt C code. The kernel limits them for the helper process that runs this
module (process.py).
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
    """The reason why a template produced no text, as a sentence for the user."""


class TemplateRefusal(jinja2.TemplateError):
    """A call of `raise_exception` in a template, which refuses the conversation."""


class _GenerationBlock(Extension):
    """The block `{% generation %}`, which marks the model's turns for training. It has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A `namespace()` that refuses names beginning with an underscore."""

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
    """Serialize to JSON as chat templates expect it: without HTML escapes, and with unescaped non-ASCII characters."""
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
        "namespace": _SafeNamespace,
    }
    return env


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Raise TemplateFailure, which names the line, if its syntax is invalid."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailure(
            f"the chat template is not valid Jinja (line {error.lineno}): {_cut(error.message or '')}"
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise TemplateFailure(f"the chat template cannot be compiled: {_cut(str(error))}") from error


def run_template(source: str, variables: dict[str, Any]) -> str:
    """Render a template.

    Raises:
        TemplateFailure: if the template is invalid, refuses the messages, fails, or writes too much.
        MemoryError: if it exceeds the memory limit of the process.
    """
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
