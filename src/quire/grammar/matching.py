"""The grammar library (llguidance) as Quire uses it: vocabulary, grammar texts, limits, one matcher per answer.

Everything that either process needs, so that both compile the same thing. The vocabulary has one token
more than the model: `end`, which the library allows where the text may end. Which ids end an answer is the
request's business (library.py). Imports no numpy: the helper process forks, and numpy brings threads.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from functools import cached_property

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from quire.types import GrammarSpec, RequestError

# Tokenising what is certain, as the library would, needs the tokenizer in the middle of a mask; left out, the
# model writes a forced text in the tokens that it prefers.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
LEXER_STATES = 50_000  # of a new matcher
TOO_MANY_STATES = "too many states"  # how the library says that these are used up
_STEP_FUEL = 1_500_000
_TRIAL_STEPS = 32
_MAX_MASK_S = 0.010  # of processor time, on average over the trial
BYTES = [bytes([b]) for b in range(256)]  # the vocabulary of a check without a model


def limits(max_lexer_states: int) -> LLParserLimits:
    """Return the bounds on the work of one mask and on the memory of one matcher.

    A lexer state takes 0.5 to 2 kB. With 151,936 tokens `_STEP_FUEL` lasts about 30 ms, and the words of a text,
    `(\\w{1,30}[ .,]?){1,200}`, need 28 of them at worst.
    """
    return LLParserLimits(max_lexer_states=max_lexer_states, step_lexer_fuel=_STEP_FUEL, verbose_errors=False)


class Vocabulary:
    """The tokens of a model, in the library's form. `end` is one beyond the last."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """`tokens` is what each id adds to a text; empty for special tokens and ids without a token."""
        self.texts, self.end = tokens, len(tokens)
        self.tokenizer = LLTokenizer(_TokenSource(tokens), eos_token=[self.end])  # type: ignore[arg-type]

    @cached_property
    def detached(self) -> DetachedConsumer:
        """Made when it is first needed, because it has a thread, and the helper process forks."""
        return DetachedConsumer(self)


class _TokenSource:
    """Tokens as LLTokenizer asks for them. What cannot be written gets a name that begins with 0xff, which
    keeps the library from matching it as text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [text or b"\xff<[%d]>" % i for i, text in enumerate([*tokens, b""])]
        self.special_token_ids = [i for i, text in enumerate(self.tokens) if text.startswith(b"\xff<[")]

    def __call__(self, text: str) -> list[int]:
        raise RuntimeError("nothing is tokenised with no_forcing")


def grammar_text(spec: GrammarSpec) -> str:
    """The spec in the library's own language. Raises RequestError."""
    if spec.kind == "json":
        grammars = [
            {"lark_grammar": f"{_OPTIONS}start: @json"},
            {"name": "json", "json_schema": json.loads(spec.text)},
        ]
    elif spec.kind == "regex":
        grammars = json.loads(LLMatcher.grammar_from_regex(spec.text))["grammars"]
        grammars[0]["lark_grammar"] = _OPTIONS + grammars[0]["lark_grammar"]
    elif spec.kind == "choice":
        texts = (
            json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in json.loads(spec.text)
        )
        # A terminal, in capitals, is one regular expression, however many texts there are.
        grammars = [{"lark_grammar": f"{_OPTIONS}start: CHOICE\nCHOICE: {' | '.join(texts)}"}]
    else:
        try:
            lark = any_to_lark(spec.text)
        except Exception as error:  # the converter raises plain Exception
            raise RequestError(f"grammar is not valid: {error}") from None
        grammars = [{"lark_grammar": _OPTIONS + lark}]
    return json.dumps({"grammars": grammars})


def build_matcher(
    vocabulary: Vocabulary, spec: GrammarSpec, text: str, max_lexer_states: int = LEXER_STATES
) -> LLMatcher:
    """Build a matcher at the beginning of a text.

    `LLMatcher.deep_copy` shares the lexer, with its states, their limit, and a lock. Each answer therefore
    has a matcher of its own.

    Raises:
        RequestError: if the library cannot enforce the grammar.
    """
    matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits(max_lexer_states))
    warnings = matcher.get_grammar_warnings()
    if matcher.is_error() or warnings:
        raise RequestError(f"{spec.kind} cannot be enforced: {_reason(matcher.get_error() or warnings[0])}")
    return matcher


class DetachedConsumer:
    """Consumes tokens with the GIL released, which the library only does for several matchers at once.

    It costs a thread switch, so it is for matchers that may be slow.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer, self._end = vocabulary.tokenizer, vocabulary.end
        self._executor = LLExecutor(1)

    def consume(self, matcher: LLMatcher, token: int) -> bool:
        # A matcher in an error state accepts the end token at once. It makes up the number.
        other = LLMatcher(self._tokenizer, "", log_level=0)
        return self._executor.consume_token_par([(matcher, token), (other, self._end)])[0]


def try_out(matcher: LLMatcher, vocabulary: Vocabulary, spec: GrammarSpec) -> None:
    """Write a random text under the grammar. Raises RequestError if none can begin, or if it takes too long."""
    rng, spent_s = random.Random(0), 0.0
    for step in range(_TRIAL_STEPS):
        begin = time.thread_time()
        mask = matcher.compute_bitmask()
        if step:  # the first prepares the others
            spent_s += time.thread_time() - begin
        token = _any_bit(mask, rng)
        if matcher.is_error() or token is None:
            reason = "no text satisfies it" if not step else "it is too complex"
            raise RequestError(f"{spec.kind} cannot be enforced: {reason}")
        if token == vocabulary.end or not matcher.consume_token(token):
            break
    if matcher.is_error():
        raise RequestError(f"{spec.kind} cannot be enforced: {_reason(matcher.get_error())}")
    if spent_s > _TRIAL_STEPS * _MAX_MASK_S:
        raise RequestError(f"{spec.kind} cannot be enforced: its masks take too long to compute")


def _any_bit(mask: bytes, rng: random.Random) -> int | None:
    """A set bit somewhere, not evenly drawn; None if there is none."""
    begin = rng.randrange(len(mask))
    rest = mask[begin:].lstrip(b"\0") or mask.lstrip(b"\0")
    if not rest:
        return None
    return 8 * (len(mask) - len(rest)) + rng.choice([bit for bit in range(8) if rest[0] >> bit & 1])


def _reason(message: str) -> str:
    """The first line, which names the place, and what a parser found; not the picture of the source between."""
    if "oneOf constraints are not supported" in message:
        return "oneOf, unless its options provably exclude each other; use anyOf"
    first, *others = (line.strip() for line in message.strip().split("\n"))
    found = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), "")
    return f"{first[:300]} {found[:200]}".strip()
