"""Quire's use of the grammar library (llguidance): vocabulary, grammar texts, limits and matchers.

Both the engine and the helper process use this module, so that they compile the same grammar. The vocabulary has one
token more than the model: `end`, which the library allows where the text may end. The ids that end an answer belong to
the request (answer.py). numpy is not imported, because it starts threads, and the helper process forks.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from functools import cached_property

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from quire.types import GrammarSpec, RequestError

# Without this option the library tokenizes forced text itself, for which it needs the tokenizer in the middle of a
# mask. With it the model writes forced text in the tokens that it prefers.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
LEXER_STATES = 50_000  # limit of a new matcher
TOO_MANY_STATES = "too many states"  # in the library's error when that limit is reached
_STEP_FUEL = 1_500_000  # lexer work per mask, in the library's units
_TRIAL_STEPS = 32
_MAX_MASK_S = 0.010  # average processor time of a mask in the trial
_PARAM = "structured_outputs"  # the request field that errors name
BYTES = [bytes([b]) for b in range(256)]  # the vocabulary of a check without a model


def limits(max_lexer_states: int) -> LLParserLimits:
    r"""Return the limits on the work of one mask and on the memory of one matcher.

    A lexer state takes 0.5 to 2 kB. With 151,936 tokens `_STEP_FUEL` lasts about 30 ms, and a pattern for the words of
    a text, `(\w{1,30}[ .,]?){1,200}`, needs up to 28 ms.

    Args:
        max_lexer_states: largest number of lexer states of the matcher.
    """
    return LLParserLimits(max_lexer_states=max_lexer_states, step_lexer_fuel=_STEP_FUEL, verbose_errors=False)


class Vocabulary:
    """The tokens of a model in the library's form, and the id `end`, one beyond the last.

    Args:
        tokens: the bytes of each id; empty for special tokens and ids without a token.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.texts, self.end = tokens, len(tokens)
        self.tokenizer = LLTokenizer(_TokenSource(tokens), eos_token=[self.end])  # type: ignore[arg-type]

    @cached_property
    def detached(self) -> DetachedConsumer:
        """Return a shared consumer, made when it is first needed: it has a thread, and the helper process forks."""
        return DetachedConsumer(self)


class _TokenSource:
    """The token table in the form that LLTokenizer reads.

    Ids without text get a name that begins with 0xff, which keeps the library from matching it as text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [text or b"\xff<[%d]>" % i for i, text in enumerate([*tokens, b""])]
        self.special_token_ids = [i for i, text in enumerate(self.tokens) if text.startswith(b"\xff<[")]

    def __call__(self, text: str) -> list[int]:
        raise RuntimeError("the library must not tokenize with no_forcing")


def grammar_text(spec: GrammarSpec) -> str:
    """Return a spec in the library's language."""
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
        # A terminal (in capitals) is compiled to one regular expression for any number of texts.
        grammars = [{"lark_grammar": f"{_OPTIONS}start: CHOICE\nCHOICE: {' | '.join(texts)}"}]
    else:
        grammars = [{"lark_grammar": _OPTIONS + spec.text}]
    return json.dumps({"grammars": grammars})


def build_matcher(
    vocabulary: Vocabulary, spec: GrammarSpec, text: str, max_lexer_states: int = LEXER_STATES
) -> LLMatcher:
    """Build a matcher at the beginning of a text.

    Each answer needs a new matcher, because `LLMatcher.deep_copy` shares the lexer with its states, their limit and a
    lock.

    Args:
        vocabulary: the model's tokens.
        spec: the spec, for errors.
        text: the spec in the library's language (`grammar_text`).
        max_lexer_states: limit on the matcher's lexer states.

    Raises:
        RequestError: if the library cannot enforce the grammar.
    """
    matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits(max_lexer_states))
    warnings = matcher.get_grammar_warnings()
    if matcher.is_error() or warnings:
        raise _refusal(spec, _short_reason(matcher.get_error() or warnings[0]))
    return matcher


def _refusal(spec: GrammarSpec, reason: str) -> RequestError:
    return RequestError(f"{spec.kind} cannot be enforced: {reason}", param=_PARAM)


class DetachedConsumer:
    """A consumer of tokens that releases the GIL, which the library does only for several matchers at once.

    Each call costs a thread switch, so it is meant for matchers that may be slow.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer, self._end = vocabulary.tokenizer, vocabulary.end
        self._executor = LLExecutor(1)

    def consume(self, matcher: LLMatcher, token: int) -> bool:
        """Let a matcher consume a token. Return False if the grammar does not allow it."""
        # The second matcher is in an error state, so it accepts the end token at once.
        other = LLMatcher(self._tokenizer, "", log_level=0)
        return self._executor.consume_token_par([(matcher, token), (other, self._end)])[0]


def try_out(matcher: LLMatcher, vocabulary: Vocabulary, spec: GrammarSpec) -> None:
    """Write a random text under a grammar. Raise RequestError if there is none, or if it takes too long."""
    rng, spent_s = random.Random(0), 0.0
    for step in range(_TRIAL_STEPS):
        begin = time.thread_time()
        mask = matcher.compute_bitmask()
        if step:  # the first mask includes one-time work
            spent_s += time.thread_time() - begin
        token = _random_set_bit(mask, rng)
        if matcher.is_error() or token is None:
            reason = "no text satisfies it" if not step else "it is too complex"
            raise _refusal(spec, reason)
        if token == vocabulary.end or not matcher.consume_token(token):
            break
    if matcher.is_error():
        raise _refusal(spec, _short_reason(matcher.get_error()))
    if spent_s > _TRIAL_STEPS * _MAX_MASK_S:
        raise _refusal(spec, "its masks take too long to compute")


def _random_set_bit(mask: bytes, rng: random.Random) -> int | None:
    """Return the index of some set bit, not uniformly distributed, or None if there is none."""
    begin = rng.randrange(len(mask))
    rest = mask[begin:].lstrip(b"\0") or mask.lstrip(b"\0")
    if not rest:
        return None
    return 8 * (len(mask) - len(rest)) + rng.choice([bit for bit in range(8) if rest[0] >> bit & 1])


def _short_reason(message: str) -> str:
    """Reduce a library error to its first line, which names the place, and the finding after the source excerpt."""
    if "oneOf constraints are not supported" in message:
        return "oneOf, unless its options provably exclude each other; use anyOf"
    first, *others = (line.strip() for line in message.strip().split("\n"))
    finding = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), "")
    return f"{first[:300]} {finding[:200]}".strip()
