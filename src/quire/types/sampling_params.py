"""The parameters of a request that decide how its tokens are sampled, and their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from quire.types.errors import QuireError, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(slots=True)
class StructuredOutputsParams:
    """A constraint on the text of a completion: exactly one of the fields is set. Names as in vLLM.

    Args:
        json: a JSON schema, as an object or as text.
        regex: a regular expression that must match the whole text.
        choice: the list of possible texts.
        grammar: a context-free grammar.
        json_object: True for any JSON object.
        disable_any_whitespace: write JSON without spaces.
        whitespace_pattern: a regular expression for the white space between two parts of JSON; None for at most one
            space.
        disable_additional_properties: let objects whose schemas have `properties` take no other keys, unless
            `additionalProperties` says so. None: as the server is set, otherwise True.

    Raises:
        RequestError: unless exactly one field is set.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                "structured_outputs must hold exactly one of json, regex, choice, grammar and json_object, "
                f"got {' and '.join(given) or 'none'}",
                param="structured_outputs",
            )


Pooling = Literal["mean", "last"]  # of the hidden states of a prompt: their mean, or the last one

GrammarKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A validated `StructuredOutputsParams` for the engine. Equal specs share one compiled grammar.

    `text` is a JSON schema, a regular expression, a JSON list of strings, or a Lark grammar.
    """

    kind: GrammarKind
    text: str
    warnings: tuple[str, ...] = field(default=(), compare=False)  # what was ignored in the schemas


@dataclass(slots=True)
class SamplingParams:
    """The sampling parameters of one request. Names and defaults as in vLLM.

    Args:
        temperature: 0 samples greedily.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens with this total probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
        repetition_penalty: applies to tokens of prompt and output (CTRL, arXiv:1909.05858); 1 is off.
        presence_penalty: applies to tokens of the output (OpenAI API); 0 is off.
        frequency_penalty: applies to tokens of the output, once per occurrence (OpenAI API); 0 is off.
        max_tokens: maximum number of output tokens, or None for no limit. Output also ends, with finish_reason
            "length", where the context is full. (The server refuses a request whose prompt leaves less room than this.)
        logprobs: number of alternatives to return for each output token; 0 returns the sampled token only.
        prompt_logprobs: the same for each token of the prompt.

    Raises:
        RequestError: if a value has the wrong type or is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "stop_token_ids":
                value = [value]
            if isinstance(value, str) or not isinstance(value, Iterable | None):
                raise RequestError(f"{name} must be a list, got {value!r}", param=name)
            setattr(self, name, list(value or ()))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias must map token ids to values, got {self.logit_bias!r}", param="logit_bias"
                )
            self.logit_bias = {_token_id("logit_bias", key): bias for key, bias in self.logit_bias.items()}
        self.verify()

    def verify(self) -> None:
        """Check every field against its rules.

        Raises:
            RequestError: names the first field that breaks a rule, its value and its limit.
        """
        for rule in _RULES:
            if rule.broken(self):
                raise RequestError(rule.message(self), param=rule.field)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


MAX_LOGPROBS = 1000


class IntRange(NamedTuple):
    """The limits of an integer field, both inclusive."""

    field: str
    low: int
    high: int


class FloatRange(NamedTuple):
    """The limits of a number field. `high` is inclusive, `low` unless `excludes_low`."""

    field: str
    low: float
    high: float
    excludes_low: bool


INT_RANGES = (
    IntRange("n", 1, 1024),
    IntRange("top_k", -1, 2**31 - 1),
    IntRange("seed", -(2**63), 2**63 - 1),
    IntRange("max_tokens", 1, 2**31 - 1),
    IntRange("min_tokens", 0, 2**31 - 1),
    IntRange("logprobs", 0, MAX_LOGPROBS),
    IntRange("prompt_logprobs", 0, MAX_LOGPROBS),
)
FLOAT_RANGES = (
    FloatRange("temperature", 0.0, 100.0, False),
    FloatRange("top_p", 0.0, 1.0, True),
    FloatRange("min_p", 0.0, 1.0, False),
    FloatRange("repetition_penalty", 0.0, 100.0, True),
    FloatRange("presence_penalty", -2.0, 2.0, False),
    FloatRange("frequency_penalty", -2.0, 2.0, False),
)
_OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}


# The part of the engine that honours each field. A field that has no owner, or two, fails when this is imported;
# the sampler checks its own list again when it is built.
FIELD_OWNERS: dict[str, tuple[str, ...]] = {
    "sampler": (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "logprobs",
    ),
    "scheduler": ("max_tokens", "stop_token_ids", "prompt_logprobs"),
    "processor": ("n", "ignore_eos"),
    "output": (
        "stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    ),
    "grammar": ("structured_outputs",),
}  # fmt: skip


def check_owners(names: Iterable[str]) -> None:
    """Raise TypeError unless `FIELD_OWNERS` lists each of the field `names` exactly once, and no other."""
    owned, given = Counter(name for listed in FIELD_OWNERS.values() for name in listed), Counter(names)
    if wrong := sorted(name for name in owned | given if owned[name] != given[name]):
        raise TypeError(
            f"fields of SamplingParams without exactly one owner in FIELD_OWNERS: {', '.join(wrong)}"
        )


check_owners(f.name for f in fields(SamplingParams))


class _Rule(NamedTuple):
    """A condition on the sampling parameters, the field to blame if it is broken, and the message of the error."""

    field: str
    broken: Callable[[SamplingParams], bool]
    message: Callable[[SamplingParams], str]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Return whether `value` is an int or a float other than NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _int_rules(field: str, low: int, high: int) -> Iterator[_Rule]:
    """Yield the rules of an integer field: its type, then its range. Optional fields may be None."""
    optional, value = field in _OPTIONAL, attrgetter(field)
    yield _Rule(
        field,
        lambda p: not (_is_int(value(p)) or (optional and value(p) is None)),
        lambda p: f"{field} must be an integer, got {value(p)!r}",
    )
    yield _Rule(
        field,
        lambda p: value(p) is not None and not low <= value(p) <= high,
        lambda p: f"{field} must be between {low} and {high}, got {value(p)}",
    )


def _float_rules(field: str, low: float, high: float, excludes_low: bool) -> Iterator[_Rule]:
    """Yield the rules of a number field: its type, then its range."""
    value, bracket = attrgetter(field), "(" if excludes_low else "["
    yield _Rule(
        field,
        lambda p: not _is_number(value(p)),
        lambda p: f"{field} must be a number, got {value(p)!r}",
    )
    yield _Rule(
        field,
        lambda p: not low <= value(p) <= high or (excludes_low and value(p) == low),
        lambda p: f"{field} must be in {bracket}{low}, {high}], got {value(p)}",
    )


def _text_rule(field: str) -> _Rule:
    value = attrgetter(field)
    return _Rule(
        field,
        lambda p: any(not isinstance(text, str) or not text for text in value(p)),
        lambda p: f"{field} must hold non-empty strings",
    )


def _token_rule(field: str) -> _Rule:
    value = attrgetter(field)
    return _Rule(
        field,
        lambda p: any(not _is_int(token) or token < 0 for token in value(p) or ()),
        lambda p: f"{field} must hold token ids (integers of at least 0)",
    )


def _wrong_biases(params: SamplingParams) -> list[str]:
    """Return the entries of `logit_bias` that are out of range, as text."""
    return [
        f"{token}: {bias!r}"
        for token, bias in (params.logit_bias or {}).items()
        if token < 0 or not isinstance(bias, (int, float)) or not -100 <= bias <= 100
    ]


# In the order in which fields are checked: rules about two fields come after the types of both.
_RULES = (
    *chain.from_iterable(_int_rules(*limits) for limits in INT_RANGES),
    *chain.from_iterable(_float_rules(*limits) for limits in FLOAT_RANGES),
    _Rule(
        "min_tokens",
        lambda p: p.max_tokens is not None and p.min_tokens > p.max_tokens,
        lambda p: f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})",
    ),
    _text_rule("stop"),
    _text_rule("bad_words"),
    _token_rule("stop_token_ids"),
    _token_rule("allowed_token_ids"),
    _Rule(
        "allowed_token_ids",
        lambda p: p.allowed_token_ids is not None and not p.allowed_token_ids,
        lambda p: "allowed_token_ids must hold at least one token id, or be left out",
    ),
    _Rule(
        "logit_bias",
        lambda p: bool(_wrong_biases(p)),
        lambda p: f"logit_bias must map token ids to values in [-100, 100], got {_wrong_biases(p)[0]}",
    ),
    _Rule(
        "stop",
        lambda p: bool(p.stop) and not p.detokenize,
        lambda p: "stop strings need detokenize=True; use stop_token_ids with token ids alone",
    ),
)


def _token_id(field: str, key: Any) -> int:
    """Return a key of a mapping as a token id: JSON objects have strings as keys."""
    try:
        return int(key)
    except (TypeError, ValueError):
        raise RequestError(f"{field} must have token ids as keys, got {key!r}", param=field) from None


def check_field_names(cls: type, given: dict[str, Any], error: type[QuireError]) -> None:
    """Raise `error` if a keyword is not a field of a dataclass. The message names the closest fields.

    Args:
        cls: the dataclass.
        given: keyword arguments for it.
        error: class of the error to raise.
    """
    import difflib

    names = [f.name for f in fields(cls)]
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise error(f"{cls.__name__} has no field {key!r}{hint}")
