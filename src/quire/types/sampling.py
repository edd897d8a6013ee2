"""What a request says about how its tokens are chosen, and the checks of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from quire.types.errors import QuireError, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class StructuredOutputsParams:
    """What an answer's text must be: exactly one of these. Names as in vLLM.

    `json` is a JSON schema (an object, or its text), `regex` must match the whole text, `choice` lists the
    possible texts, `grammar` is a context-free grammar, `json_object` asks for any JSON object.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                "structured_outputs must hold exactly one of json, regex, choice, grammar and json_object, "
                f"got {' and '.join(given) or 'none'}"
            )


Pooling = Literal["mean", "last"]  # of a prompt's hidden states: their mean, or that of the last token

GrammarKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A checked `StructuredOutputsParams` on its way to the engine; equal ones share their compiled form.

    `text` is a JSON schema, a regular expression, a JSON list of strings, or a Lark or GBNF grammar.
    """

    kind: GrammarKind
    text: str


@dataclass(slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and defaults as in vLLM.

    `max_tokens` (None: no bound) is the most that an answer has: it also ends, with finish_reason "length", where the
    context is full. (The server refuses requests that ask for more than their prompt leaves room for.)
    temperature 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `repetition_penalty`
    (CTRL, arXiv:1909.05858) looks at prompt and output; `presence_penalty` and `frequency_penalty`
    (OpenAI API) at the output only. `logprobs` is the number of top alternatives to return for each
    output token (0: only the chosen token's), `prompt_logprobs` the same for prompt tokens.
    Raises RequestError from `verify` on a value out of range.
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
                raise RequestError(f"{name} must be a list, got {value!r}")
            setattr(self, name, list(value or ()))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(f"logit_bias must map token ids to values, got {self.logit_bias!r}")
            self.logit_bias = {_as_int("logit_bias", k): v for k, v in self.logit_bias.items()}
        self.verify()

    def verify(self) -> None:
        """Raise RequestError, naming the field and its limit, unless every value is in range."""
        for name, low, high in INT_RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise RequestError(f"{name} must be an integer, got {value!r}")
            if not low <= value <= high:
                raise RequestError(f"{name} must be between {low} and {high}, got {value}")
        for name, lowest, highest, open_low in FLOAT_RANGES:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
                raise RequestError(f"{name} must be a number, got {value!r}")
            if not lowest <= value <= highest or (open_low and value == lowest):
                bracket = "(" if open_low else "["
                raise RequestError(f"{name} must be in {bracket}{lowest}, {highest}], got {value}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        for name in ("stop", "bad_words"):
            if any(not isinstance(s, str) or not s for s in getattr(self, name)):
                raise RequestError(f"{name} must hold non-empty strings")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is not None and any(not isinstance(t, int) or isinstance(t, bool) or t < 0 for t in ids):
                raise RequestError(f"{name} must hold token ids (integers of at least 0)")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must hold at least one token id, or be left out")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias must map token ids to values in [-100, 100], got {token}: {bias!r}"
                )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids with token ids alone")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


MAX_LOGPROBS = 1000
_OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
INT_RANGES = (
    ("n", 1, 1024),
    ("top_k", -1, 2**31 - 1),
    ("seed", -(2**63), 2**63 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
FLOAT_RANGES = (
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)

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


def _as_int(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name} must have token ids as keys, got {value!r}") from None


def check_field_names(cls: type, given: dict[str, Any], error: type[QuireError]) -> None:
    """Raise `error` for a keyword that is no field of the dataclass `cls`, naming the closest ones."""
    import difflib

    names = [f.name for f in fields(cls)]
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise error(f"{cls.__name__} has no field {key!r}{hint}")
