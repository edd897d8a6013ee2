"""Command-line flags built from dataclass fields: a field's name, type, default and help become the flag's.

`--max-num-seqs` and `--max_num_seqs` are the same flag, and `FlagFormatter` shows the first form only. The result holds
only the flags that were given, so defaults live in one place, the dataclass. The model is also the first word of every
command (`add_model`, `engine_settings`).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.config import EngineConfig
from quire.frontend.location import names_a_model
from quire.types import ConfigError, RequestError, SamplingParams, StructuredOutputsParams

DEFAULT_MAX_TOKENS = 1024  # of an answer in the terminal, if neither a flag nor the model limits it
MODEL_HELP = "model: a folder, a .gguf file, a Hugging Face id, demo or demo-draft (default: demo)"
_SHORT = {"model": "-m", "speculative_config": "-sc", "data_parallel_size": "-dp"}
# Fields for which `generation_config.json` of a model may have another default.
_OF_MODEL = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
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


class FlagFormatter(argparse.HelpFormatter):
    """Help that lists each switch once: without the spelling with underscores, and with one metavar."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(name for name in action.option_strings if "_" not in name)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return names if action.nargs == 0 else f"{names} {value}"


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
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for each field of the dataclass `cls`.

    Args:
        title: group in `--help` of the fields whose metadata name no group.
        skip: fields without a flag.
        several: flags of lists take more than one value at once.
        defaults: values that this command uses instead of the defaults of `cls`, for `--help`.
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
        if f.name in _SHORT:
            names.insert(0, _SHORT[f.name])
        help = _with_default(cls, f, defaults or {})
        options = _options(hints[f.name])
        if several and options.get("action") == "append":
            options |= {"action": RepeatedValue, "nargs": "+"}
        name = f.metadata.get("group", title)
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        group.add_argument(*names, dest=flag, default=argparse.SUPPRESS, help=help, **options)


def _with_default(cls: type, f: Field[Any], defaults: Mapping[str, Any]) -> str:
    """Return the help of a field with its default, unless it has none or the text already says it."""
    text: str = f.metadata["help"] if "help" in f.metadata else _SAMPLING_HELP.get(f.name, "")
    default = defaults.get(f.name, f.default)
    if default is MISSING or default is None or "default" in text:
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    of_model = cls is SamplingParams and f.name in _OF_MODEL and f.name not in defaults
    return f"{text} (default: {f'that of the model, or {default}' if of_model else default})"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument MODEL of a command whose other arguments are flags."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=MODEL_HELP)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that were given, with the model from its flag or from the first word.

    Raises:
        ConfigError: if both name a model, and not the same one.
    """
    settings = given(args, EngineConfig)
    if args.model_name is not None:
        check_one_model(args.model_name, settings)
        settings["model"] = args.model_name
    return settings


def check_one_model(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if `--model` and the positional argument name different models."""
    if settings.get("model", name) != name:
        raise ConfigError(f"two models are named, {name} and --model {settings['model']}; name one")


def split_model(words: list[str], args: argparse.Namespace, *, always: bool) -> list[str]:
    """Split a model from the words of a command line, set `args.model_name`, and return the other words.

    Args:
        words: positional arguments.
        args: flags; with `--model` all words are prompts.
        always: the first word is a model whatever it looks like.
    """
    args.model_name = None
    if words and not hasattr(args, "model") and (always or names_a_model(words[0])):
        args.model_name, *words = words
    return words


def parse_field(cls: type, name: str, text: str) -> Any:
    """Parse the value of a field of `cls` as its flag does; a switch is `on` or `off`, a list is JSON or one value.

    Raises:
        RequestError: if there is no such field, or the text is not a value of it.
    """
    hints = get_type_hints(cls)
    options = _options(hints[name]) if name in hints and name != "structured_outputs" else None
    if options is None:
        near = difflib.get_close_matches(name, hints, 1)
        raise RequestError(f"there is no setting {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        if options.get("action") is argparse.BooleanOptionalAction:
            return {"on": True, "true": True, "off": False, "false": False}[text.lower()]
        if options.get("action") == "append":
            items = json.loads(text) if text.startswith("[") else [text]
            return [options["type"](str(item)) for item in items]
        return options.get("type", str)(text)
    except (KeyError, ValueError, argparse.ArgumentTypeError):
        raise RequestError(f"{name} cannot be {text!r}") from None


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
        return {"type": json_object, "metavar": "JSON"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    parse: Callable[[str], Any] = integer if hint is int else hint
    return {"type": parse, "metavar": hint.__name__.upper()}


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")


def integer(text: str) -> int:
    """Parse an integer; the suffixes k, m and g mean powers of 1024, as in `--max-model-len 32k`."""
    suffix = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower())
    try:
        return int(float(text[:-1]) * suffix) if suffix else int(text)
    except (ValueError, OverflowError):  # OverflowError: infinity, as in `infk`
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
