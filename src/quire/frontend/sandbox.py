"""The Jinja environment in which chat templates run. A template comes with a checkpoint: it is not trusted.

Jinja's immutable sandbox keeps it from Python's internals and from changing its input. What the sandbox
does not bound is bounded here: loop turns and macro calls (a meter, woven into the compiled template),
the size of texts and numbers that operators and filters build, and the size of the output.
"""

from __future__ import annotations

import contextvars
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from quire.types import RequestError

MAX_TURNS = 2_000_000  # loop turns and macro calls of one rendering
MAX_CHARS = 16_000_000  # of any text a template builds, its output included
_MAX_WIDTH = 10_000  # of a padded field or an indent
_WIDE_FIELD = re.compile(r"[\d*]{5,}|\*")

_turns_left: contextvars.ContextVar[list[int]] = contextvars.ContextVar("turns_left")


class TemplateRefusal(jinja2.TemplateError):
    """`raise_exception` in a template: the conversation is not one that the model takes."""


def _spend(turns: int = 1) -> None:
    left = _turns_left.get()
    left[0] -= turns
    if left[0] < 0:
        raise SecurityError(f"it loops more than {MAX_TURNS} times")


def _metered(items: Any) -> Any:
    """Wraps what a `for` runs over. Undefined and None pass, so that Jinja's own rules and errors hold."""
    if isinstance(items, (list, tuple, dict, str, range)):
        _spend(len(items))
        return items
    return _metered_turns(items) if isinstance(items, Iterator) else items


def _metered_turns(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend()
        yield item


def _metered_call(_: Any) -> str:
    _spend()
    return ""


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARS:
        raise SecurityError(f"it builds a text of more than {MAX_CHARS} characters")
    return value


class _Meter(jinja2.visitor.NodeTransformer):
    """Weaves the meters into a parsed template: around every loop's iterable, every `~`, into every macro."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_metered")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_bounded")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_bounded") if node.node is not None else node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        call = _filtered(nodes.Const(None).set_lineno(node.lineno), "_metered_call")
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    wrapped = nodes.Filter(node, name, [], [], None, None)
    wrapped.set_lineno(node.lineno)
    return wrapped


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = _Meter().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(times, int) and len(text) * times > MAX_CHARS:
                    raise SecurityError(f"it builds a text of more than {MAX_CHARS} characters")
            if isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) > 2**63:
                raise SecurityError("it multiplies numbers of more than 64 bits")
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise SecurityError("it raises a number to a power beyond 64")
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return _bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A method such as `ljust` takes a width; no template needs one as large as a memory."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ in ("format", "format_map"):
                _check_format(owner, args)
            elif __obj.__name__ in ("ljust", "rjust", "center", "zfill", "expandtabs"):
                _check_widths(args)
            elif __obj.__name__ in ("replace", "join", "translate"):
                _check_growth(owner, args)
        return _bounded(super().call(__context, __obj, *args, **kwargs))


def _check_format(template: str, args: Any) -> None:
    if _WIDE_FIELD.search(template):
        raise SecurityError("it formats a field of more than 9999 characters")
    if "{" in template:  # `{:{width}}` takes its width from an argument
        _check_widths(args)


def _check_widths(args: Any) -> None:
    if any(isinstance(a, int) and abs(a) > _MAX_WIDTH for a in args):
        raise SecurityError(f"it pads a text to more than {_MAX_WIDTH} characters")


def _check_growth(owner: str, args: Any) -> None:
    longest = max((len(a) for a in args if isinstance(a, str)), default=0)
    count = max((len(a) for a in args if isinstance(a, (list, tuple))), default=len(owner) + 1)
    if max(longest, len(owner)) * count > MAX_CHARS * 64:
        raise SecurityError(f"it builds a text of more than {MAX_CHARS} characters")


def _guarded(filter_: Callable[..., Any], check_format: bool) -> Callable[..., Any]:
    """A filter that pads, with its widths checked."""

    def guarded(value: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if check_format:
            _check_format(str(value), given)
        else:
            _check_widths(given)
        return filter_(value, *args, **kwargs)

    return guarded


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
    """As chat templates expect it: no HTML escapes, other letters than ASCII as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    for name, check_format in (("center", False), ("indent", False), ("format", True)):
        env.filters[name] = _guarded(env.filters[name], check_format)
    env.filters |= {"tojson": _to_json, "_metered": _metered, "_bounded": _bounded, "_metered_call": _metered_call}
    env.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Names,
    }
    env.globals.pop("lipsum")  # makes random texts of any length
    return env


@lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """The compiled template; a RequestError says where its syntax is wrong."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template is not valid Jinja (line {error.lineno}): {error.message}") from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise RequestError(f"the chat template cannot be compiled: {error}") from error


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template, for those who want to know how it reads its input."""
    return _environment().parse(source)


def run_template(source: str, variables: dict[str, Any]) -> str:
    """The rendered text. Whatever goes wrong in the template is a RequestError."""
    template = compile_template(source)
    token = _turns_left.set([MAX_TURNS])
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(variables):
            size += len(part)
            if size > MAX_CHARS:
                raise SecurityError(f"it writes more than {MAX_CHARS} characters")
            parts.append(part)
    except TemplateRefusal as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    except SecurityError as error:
        raise RequestError(f"the chat template was stopped: {error}") from error
    except Exception as error:  # a template can make any expression fail
        reason = str(error) or type(error).__name__
        raise RequestError(f"the chat template failed on these messages: {reason[:300]}") from error
    finally:
        _turns_left.reset(token)
    return "".join(parts)
