"""A user's prompt and sampling parameters to engine requests, checked against the model.

After this nothing can be wrong with a request: every id is in the vocabulary, there is room for at least one
token, every default is filled in. n answers become n engine requests with seeds of their own.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from quire.frontend.length import check_length
from quire.frontend.structured_spec import grammar_spec
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer
from quire.types import EngineRequest, GrammarSpec, Pooling, RequestError, SamplingParams

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"

_MASK = 2**64 - 1


class InputProcessor:
    """Owns the counter from which requests without a seed get theirs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        eos_ids: Sequence[int],
        seed: int = 0,
        defaults: Mapping[str, Any] | None = None,
        generates: bool = True,
    ) -> None:
        """`vocab_size` is the model's; `defaults` are from `load_generation_defaults`. `generates`: it has a head."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_ids = list(eos_ids)
        self._generates = generates
        known = {f.name for f in fields(SamplingParams)}
        self.defaults = {name: value for name, value in (defaults or {}).items() if name in known}
        self._seed = seed
        self._count = itertools.count()

    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none: the model's own defaults over those of SamplingParams."""
        return SamplingParams(**self.defaults)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        pooling: Pooling | None = None,
    ) -> list[EngineRequest]:
        """One engine request per answer, in order of their index. Raises RequestError for what cannot be served.

        `add_special_tokens` is False for the text of a chat template, which holds its own.
        """
        if pooling is None and not self._generates:
            raise RequestError(
                "this model has no head (lm_head), so it cannot generate text: use it for embeddings"
            )
        params = self.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
        params.verify()
        ids = self.prompt_ids(prompt, add_special_tokens)
        self._check_params(params)
        max_tokens = self._max_tokens(len(ids), params)
        grammar = self._grammar(params)
        ends = [] if params.ignore_eos and grammar is None else self.eos_ids
        stop_ids = list(dict.fromkeys([*ends, *params.stop_token_ids]))
        bad_words = self._bad_words_ids(params.bad_words)
        count = next(self._count)
        return [
            EngineRequest(
                id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt=ids,
                # Prompt log-probabilities are the same for every answer: computed once.
                params=replace(
                    params,
                    n=1,
                    structured_outputs=None,
                    max_tokens=max_tokens,
                    prompt_logprobs=None if index else params.prompt_logprobs,
                ),
                stop_ids=stop_ids,
                eos_ids=self.eos_ids,
                bad_words_ids=bad_words,
                seed=self._seed_of(params.seed, count, index),
                priority=priority,
                cache_salt=cache_salt,
                grammar=grammar,
                pooling=pooling,
            )
            for index in range(params.n)
        ]

    def prompt_ids(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt in any of its forms, checked."""
        if isinstance(prompt, Mapping):
            prompt = _member(prompt)
        if isinstance(prompt, str):
            check_length(self.tokenizer, prompt, self.max_model_len)
            ids = self.tokenizer.encode(prompt, add_special_tokens)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            ids = _integers("prompt_token_ids", prompt)
        else:
            raise RequestError(f"prompt must be a string or a list of token ids, got {type(prompt).__name__}")
        if not ids:
            raise RequestError("prompt is empty: it needs at least one token")
        self._check_ids("prompt token ids", ids)
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"prompt has {len(ids)} tokens, but max_model_len is {self.max_model_len}, "
                "which must also hold at least one output token"
            )
        return ids

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestError(
                f"{name} must be at least 0 and below the vocabulary size {self.vocab_size}, got {wrong}"
            )

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias keys", list(params.logit_bias or ()))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.vocab_size:
                raise RequestError(
                    f"{name} must not exceed the vocabulary size {self.vocab_size}, got {value}"
                )
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")

    def _grammar(self, params: SamplingParams) -> GrammarSpec | None:
        if params.structured_outputs is None:
            return None
        if isinstance(self.tokenizer, NoTokenizer):
            raise RequestError("structured_outputs need a tokenizer, and this engine has none")
        if not (self.eos_ids or params.stop_token_ids):
            raise RequestError(
                "structured_outputs need a token that ends the answer: the model names no end-of-sequence token, "
                "so give stop_token_ids"
            )
        return grammar_spec(params.structured_outputs)

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """As asked for, within the rest of the context."""
        room = self.max_model_len - prompt_len
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but after a prompt of {prompt_len} tokens only {room} fit "
                f"into max_model_len ({self.max_model_len})"
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _bad_words_ids(self, words: list[str]) -> list[list[int]]:
        """Each word as at the beginning of a text and as after a space, where that is another first token."""
        found: list[list[int]] = []
        for word in words:
            bare = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            if not bare:
                raise RequestError(f"bad_words must hold words with visible characters, got {word!r}")
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        for ids in found:
            self._check_ids("tokens of bad_words", ids)
        return found

    def _seed_of(self, given: int | None, count: int, index: int) -> int:
        """A signed 64-bit number. Runs with the same engine seed and order of requests repeat."""
        if given is not None:
            return (given + index + 2**63 & _MASK) - 2**63
        mixed = self._seed & _MASK
        for part in (count, index):
            mixed = _mix(mixed + 0x9E3779B97F4A7C15 * (part + 1) & _MASK)
        return mixed >> 1


def _mix(x: int) -> int:
    """The finaliser of SplitMix64: each input bit changes half of the output bits."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _member(prompt: Mapping[str, Any]) -> Any:
    """What a prompt given as an object holds; ids come before the text that they were made from."""
    if prompt.get("prompt_token_ids") is not None:
        if isinstance(prompt["prompt_token_ids"], str):
            raise RequestError("prompt_token_ids must be a list of token ids, got a string")
        return prompt["prompt_token_ids"]
    if not isinstance(prompt.get("prompt"), str):
        raise RequestError(
            'a prompt object must hold "prompt" (a string) or "prompt_token_ids" (a list of integers)'
        )
    return prompt["prompt"]


def _integers(name: str, values: Sequence[Any]) -> list[int]:
    if all(type(v) is int for v in values):
        return list(values)
    try:
        if any(isinstance(v, bool) for v in values):
            raise TypeError
        return [operator.index(v) for v in values]  # numpy's integers pass
    except TypeError:
        wrong = next(v for v in values if isinstance(v, bool) or not hasattr(v, "__index__"))
        raise RequestError(f"{name} must hold integers, got {wrong!r}") from None
