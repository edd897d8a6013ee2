"""The Jinja environment in which chat templates run. A template comes with a checkpoint: it is not trusted.

Jinja's immutable sandbox keeps it from Python's internals and from changing its input. What the sandbox
does not bound is bounded here: turns of loops and calls, and the time they take (a meter woven into the
compiled template), the size of texts and numbers that expressions build, and the size of the output.
"""

from __future__ import annotations

import contextvars
import functools
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.types import RequestError

MAX_TURNS = 2_000_000  # loop turns, calls and filters of one rendering
MAX_SECONDS = 5.0
MAX_CHARS = 16_000_000  # of any text a template builds, its output included
_MAX_WIDTH = 10_000  # of a padded field or an indent
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d{5,}|\*|\d*\.(\d{5,}|\*))")
_WIDE_BRACES = re.compile(r"\{[^{}]*\d{5,}[^{}]*\}")
_DROPPED_FILTERS = ("urlize", "xmlattr", "pprint", "random", "wordwrap")  # slow on long texts, of no use here


@dataclass(slots=True)
class _Budget:
    """What one rendering may still spend."""

    turns: int
    deadline_s: float


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget")


class TemplateRefusal(jinja2.TemplateError):
    """`raise_exception` in a template: the conversation is not one that the model takes."""


def _spend() -> None:
    budget = _budget.get()
    budget.turns -= 1
    if budget.turns < 0:
        raise SecurityError(f"it loops more than {MAX_TURNS} times")
    if time.monotonic() > budget.deadline_s:
        raise SecurityError(f"it runs for more than {MAX_SECONDS} seconds")


def _metered(value: Any) -> Any:
    """A filter that passes its value on. Each use costs one turn, and a value out of proportion ends it all."""
    _spend()
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARS:
        raise SecurityError(f"it builds a text of more than {MAX_CHARS} characters")
    return value


class _Meter(NodeTransformer):
    """Weaves the meter into a parsed template: into every loop, macro and filter, around every `~` and text block."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _turn(node))
        if node.test is not None:
            node.test = _filtered(node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _turn(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return node if node.node is None else _filtered(node)  # None: the body of a block

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, node.lineno)
        return node


def _turn(node: nodes.Node) -> nodes.Node:
    """A statement that costs one turn."""
    return nodes.ExprStmt(_filtered(nodes.Const(None).set_lineno(node.lineno))).set_lineno(node.lineno)


def _filtered(node: nodes.Node | None, lineno: int = 0) -> nodes.Filter:
    wrapped = nodes.Filter(node, "_metered", [], [], None, None)
    wrapped.set_lineno(lineno or (node.lineno if node is not None else 0))
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
                if (
                    isinstance(text, (str, list, tuple))
                    and isinstance(times, int)
                    and len(text) * times > MAX_CHARS
                ):
                    raise SecurityError(f"it builds a text of more than {MAX_CHARS} characters")
            if isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) > 2**63:
                raise SecurityError("it multiplies numbers of more than 64 bits")
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise SecurityError("it raises a number to a power beyond 64")
        if operator == "%" and isinstance(left, str):
            _check_format(left, ())
        return _metered(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A method such as `ljust` takes a width; no template needs one as large as a memory."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            given = [*args, *kwargs.values()]
            if __obj.__name__ in ("format", "format_map"):
                _check_format(owner, given)
            elif __obj.__name__ in ("ljust", "rjust", "center", "zfill", "expandtabs"):
                _check_widths(owner, given)
            elif __obj.__name__ in ("replace", "join", "translate"):
                _check_growth(owner, given)
        return _metered(super().call(__context, __obj, *args, **kwargs))


def _check_format(template: Any, args: Sequence[Any]) -> None:
    if _WIDE_PERCENT.search(str(template).replace("%%", "")) or _WIDE_BRACES.search(str(template)):
        raise SecurityError("it formats a field of more than 9999 characters")
    if re.search(r"\{[^{}]*\{", str(template)):  # `{:{width}}` takes its width from an argument
        _check_widths(template, args)


def _check_widths(_: Any, args: Sequence[Any]) -> None:
    if any(isinstance(a, (int, float)) and abs(a) > _MAX_WIDTH for a in args):
        raise SecurityError(f"it pads a text to more than {_MAX_WIDTH} characters")


def _check_growth(value: Any, args: Sequence[Any]) -> None:
    """Each place of `value` may be filled with the longest text that comes along."""
    sized = [a for a in (value, *args) if isinstance(a, (str, list, tuple))]
    sizes = sorted((len(a) for a in sized), reverse=True)
    parts = sum(len(part) for a in sized if not isinstance(a, str) for part in a if isinstance(part, str))
    if parts > MAX_CHARS or (len(sizes) > 1 and sizes[0] * sizes[1] > 64 * MAX_CHARS):
        raise SecurityError(f"it builds a text of more than {MAX_CHARS} characters")


def _guarded(filter_: Callable[..., Any], check: Callable[[Any, Sequence[Any]], None]) -> Callable[..., Any]:
    """A filter whose arguments are checked before it works. Keeps Jinja's marks for extra first arguments."""

    @functools.wraps(filter_)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        at = 1 if hasattr(filter_, "jinja_pass_arg") else 0
        check(args[at], [*args[at + 1 :], *kwargs.values()])
        return filter_(*args, **kwargs)

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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    for name in _DROPPED_FILTERS:
        del env.filters[name]
    env.filters |= {"tojson": _to_json, "_metered": _metered}
    checks = {_check_widths: ("center", "indent", "batch", "slice", "tojson"), _check_format: ("format",)}
    checks |= {_check_growth: ("replace", "join")}
    for check, names in checks.items():
        env.filters |= {name: _guarded(env.filters[name], check) for name in names}
    env.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Names,
    }
    env.globals.pop("lipsum")  # makes random texts of any length
    return env


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """The compiled template; a RequestError says where its syntax is wrong."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"the chat template is not valid Jinja (line {error.lineno}): {error.message}"
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise RequestError(f"the chat template cannot be compiled: {error}") from error


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template, for those who want to know how it reads its input."""
    return _environment().parse(source)


def run_template(source: str, variables: dict[str, Any]) -> str:
    """The rendered text. Whatever goes wrong in the template is a RequestError."""
    template = compile_template(source)
    token = _budget.set(_Budget(MAX_TURNS, time.monotonic() + MAX_SECONDS))
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
        _budget.reset(token)
    return "".join(parts)
