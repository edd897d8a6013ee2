"""Command-line flags built from dataclass fields: a field's name, type, default and help become the flag's.

`--max-num-seqs` and `--max_num_seqs` are the same flag. The result holds only the flags that were given, so defaults
live in one place, the dataclass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import types
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.types import RequestError, SamplingParams, StructuredOutputsParams

_SAMPLING_HELP = {
    "n": "number of answers for each prompt",
    "temperature": "0 decodes greedily; higher values vary more",
    "top_k": "sample from the k most likely tokens (0: from all)",
    "top_p": "sample from the most likely tokens whose probabilities add up to this",
    "min_p": "drop tokens less likely than this share of the most likely one",
    "repetition_penalty": "above 1, tokens of the prompt and the answer become less likely",
    "presence_penalty": "above 0, tokens of the answer become less likely",
    "frequency_penalty": "like presence_penalty, once for each time a token has occurred",
    "seed": "seed of sampling: the same seed gives the same tokens",
    "max_tokens": "longest answer in tokens; a full context ends it too",
    "min_tokens": "shortest answer in tokens",
    "stop": "end the answer before this text (may be repeated)",
    "stop_token_ids": "end the answer after this token id (may be repeated)",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "continue after the end-of-sequence token",
    "logit_bias": 'values to add to logits, by token id: {"42": -5}',
    "allowed_token_ids": "sample only this token id (may be repeated)",
    "bad_words": "never generate this word (may be repeated)",
    "logprobs": "number of top log-probabilities to return for each token",
    "prompt_logprobs": "like logprobs, for the tokens of the prompt",
    "skip_special_tokens": "omit special tokens from the text",
    "spaces_between_special_tokens": "put spaces between special tokens",
}


class RepeatedValue(argparse.Action):
    """Action of a flag whose value is a list.

    The flag takes several values at once (`--api-key one two`), may be repeated (`--api-key three`), and takes a JSON
    list. It may also swallow a positional argument that follows it; `several` of the namespace names the last flag that
    may have done so.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if len(values) > 1:
            namespace.several = option_string
        elif values[0].startswith("["):
            with contextlib.suppress(ValueError):
                values = [str(value) for value in json.loads(values[0])]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    skip: Collection[str] = (),
    several: bool = False,
) -> None:
    """Add a flag for each field of the dataclass `cls`.

    Args:
        title: group in `--help` of the fields whose metadata name no group.
        skip: fields without a flag.
        several: flags of lists take more than one value at once.
    """
    groups: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for f in fields(cls):
        if f.name in skip or f.name == "structured_outputs":  # see add_structured_flags
            continue
        flag = _flag(cls, f.name)
        names = [f"--{flag.replace('_', '-')}"]
        if "_" in flag:
            names.append(f"--{flag}")
        help = _with_default(f) if "help" in f.metadata else _SAMPLING_HELP.get(f.name, "")
        options = _options(hints[f.name])
        if several and options.get("action") == "append":
            options |= {"action": RepeatedValue, "nargs": "+"}
        name = f.metadata.get("group", title)
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        group.add_argument(*names, dest=flag, default=argparse.SUPPRESS, help=help, **options)


def _with_default(f: Field[Any]) -> str:
    """Return the help of a setting with its default, unless that is off, zero or None, or the text already says it."""
    text: str = f.metadata["help"]
    if f.default in (MISSING, None, False) or "default" in text:
        return text
    default = "on" if f.default is True else f.default
    return f"{text} (default: {default})"


def add_structured_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of structured output, which exclude each other. A schema or grammar may be the name of a file."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", metavar="FILE|TEXT", help="the answer is JSON that satisfies this schema"
    )
    group.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    group.add_argument("--regex", help="the answer matches this regular expression")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="the answer is this text (give several)"
    )
    group.add_argument(
        "--grammar", metavar="FILE|TEXT", help="the answer follows this grammar, in GBNF or Lark"
    )


def given_structured(args: argparse.Namespace) -> dict[str, Any]:
    """Return the field of SamplingParams that a flag of `add_structured_flags` sets, or nothing.

    Raises:
        RequestError: if a file cannot be read.
    """
    schema, grammar = args.json_schema, args.grammar
    if not args.json_object and all(one is None for one in (schema, grammar, args.regex, args.choice)):
        return {}
    params = StructuredOutputsParams(
        json=None if schema is None else _file_or_text(schema),
        json_object=args.json_object,
        regex=args.regex,
        choice=args.choice,
        grammar=None if grammar is None else _file_or_text(grammar),
    )
    return {"structured_outputs": params}


def _file_or_text(value: str) -> str:
    if any(c in value for c in "{:\n"):  # a schema has braces, a grammar rules
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {value}: {error}") from None


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the fields of `cls` whose flags were given, by field name."""
    flags = {f.name: _flag(cls, f.name) for f in fields(cls)}
    return {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}


def _flag(cls: type, name: str) -> str:
    """Return the flag of a field: --sampling-seed for the seed of a request, because --seed is the engine's."""
    return "sampling_seed" if cls is SamplingParams and name == "seed" else name


def _options(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a type."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        (inner,) = (a for a in get_args(hint) if a is not type(None))
        return _options(inner)
    if origin is Literal:
        return {"choices": get_args(hint)}
    if origin is list:
        (item,) = get_args(hint)
        return {"action": "append", "type": item, "metavar": item.__name__.upper()}
    if origin is dict:
        return {"type": _object, "metavar": "JSON"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    parse: Callable[[str], Any] = integer if hint is int else hint
    return {"type": parse, "metavar": hint.__name__.upper()}


def _object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")


def integer(text: str) -> int:
    """Parse an integer; the suffixes k, m and g mean powers of 1024, as in `--max-model-len 32k`."""
    suffix = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower())
    try:
        return int(float(text[:-1]) * suffix) if suffix else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
