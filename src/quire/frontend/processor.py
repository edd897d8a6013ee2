"""Convert a user's prompt and sampling parameters to engine requests, checked against the model.

The resulting requests are valid: every id is in the vocabulary, at least one more token fits into the context, and
every default is filled in. A request for n choices becomes n engine requests with different seeds.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from quire.frontend.json_schema import STRUCTURED_OUTPUTS
from quire.frontend.length import check_length
from quire.frontend.structured_spec import grammar_spec
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer
from quire.types import EngineRequest, GrammarSpec, Pooling, RequestError, SamplingParams, answer_room

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"

_MASK = 2**64 - 1


class InputProcessor:
    """A converter of prompts to engine requests, with the counter that seeds requests without a seed.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of token ids of the model.
        max_model_len: length of the context in tokens.
        eos_ids: ids that end a choice, unless a request sets `ignore_eos`.
        seed: the engine's seed. Equal seeds and an equal order of requests give equal results.
        defaults: the model's sampling defaults (`load_generation_defaults`). Unknown names are ignored.
        generates: whether the model has a head (`lm_head`). Without one, only embeddings can be computed.
    """

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
        """Return the parameters of a request without any: the model's defaults over those of SamplingParams."""
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
        """Check a request and build one engine request per choice, in order of index.

        Args:
            request_id: id of the request. With n > 1 the engine requests are called "id#0", "id#1" and so on.
            prompt: a string, token ids, or a mapping with "prompt_token_ids" or "prompt".
            params: how to sample; None means `default_params`.
            priority: lower runs first under `scheduling_policy="priority"`.
            cache_salt: only requests with the same salt share cached blocks.
            add_special_tokens: let the tokenizer add its special tokens to a string. False for text from a chat
                template, which writes them itself.
            pooling: compute an embedding with this pooling instead of generating.

        Raises:
            RequestError: if the request is invalid or does not fit into the context. Its `param` names the field.
        """
        params = self._verified(params, pooling)
        ids = self.prompt_ids(prompt, add_special_tokens, pooling)
        self._check_params(params)
        max_tokens = self._max_tokens(len(ids), params, pooling)
        grammar = self._grammar(params)
        ends = [] if params.ignore_eos and grammar is None else self.eos_ids
        stop_ids = list(dict.fromkeys([*ends, *params.stop_token_ids]))
        bad_words = self._bad_words_ids(params.bad_words)
        count = next(self._count)
        return [
            EngineRequest(
                id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt=ids,
                # Prompt log-probabilities are the same for every choice, so only the first computes them.
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

    def _verified(self, params: SamplingParams | None, pooling: Pooling | None) -> SamplingParams:
        """Return the parameters of a request, or raise RequestError if they or the request are invalid."""
        if pooling is None and not self._generates:
            raise RequestError(
                "this model has no head (lm_head), so it cannot generate text: use it for embeddings",
                param="model",
            )
        params = self.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                param="sampling_params",
            )
        params.verify()
        return params

    def prompt_ids(
        self, prompt: Prompt, add_special_tokens: bool = True, pooling: Pooling | None = None
    ) -> list[int]:
        """Return the token ids of a prompt in any form. Arguments and errors are those of `process`."""
        if isinstance(prompt, Mapping):
            prompt = _unwrapped(prompt)
        if isinstance(prompt, str):
            check_length(self.tokenizer, prompt, self.max_model_len)
            ids = self.tokenizer.encode(prompt, add_special_tokens)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            ids = _integers(prompt)
        else:
            raise RequestError(
                f"prompt must be a string or a list of token ids, got {type(prompt).__name__}", param="prompt"
            )
        if not ids:
            raise RequestError("prompt is empty: it needs at least one token", param="prompt")
        self._check_ids("prompt", "prompt token ids", ids)
        answer_room(len(ids), self.max_model_len, pooling)
        return ids

    def _check_ids(self, field: str, name: str, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestError(
                f"{name} must be at least 0 and below the vocabulary size {self.vocab_size}, got {wrong}",
                param=field,
            )

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", "stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", "allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", "logit_bias keys", list(params.logit_bias or ()))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.vocab_size:
                raise RequestError(
                    f"{name} must not exceed the vocabulary size {self.vocab_size}, got {value}", param=name
                )
        if params.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError(
                "stop strings need a tokenizer, and this engine has none: use stop_token_ids", param="stop"
            )

    def _grammar(self, params: SamplingParams) -> GrammarSpec | None:
        if params.structured_outputs is None:
            return None
        if isinstance(self.tokenizer, NoTokenizer):
            raise RequestError(
                "structured_outputs need a tokenizer, and this engine has none", param=STRUCTURED_OUTPUTS
            )
        if not (self.eos_ids or params.stop_token_ids):
            raise RequestError(
                "structured_outputs need a token that ends the answer: the model names no end-of-sequence token, "
                "so give stop_token_ids",
                param=STRUCTURED_OUTPUTS,
            )
        return grammar_spec(params.structured_outputs)

    def _max_tokens(self, prompt_len: int, params: SamplingParams, pooling: Pooling | None) -> int:
        """Return the token limit of a choice: the requested one, clipped to what fits into the context."""
        room = answer_room(prompt_len, self.max_model_len, pooling)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens must be at most {room}, got {params.min_tokens}: the prompt has {prompt_len} tokens, and "
                f"both together must fit into max_model_len ({self.max_model_len})",
                param="min_tokens",
                code="context_length_exceeded",
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _bad_words_ids(self, words: list[str]) -> list[list[int]]:
        """Tokenize each word as at the beginning of a text, and as after a space if its first token differs."""
        sequences: list[list[int]] = []
        for word in words:
            bare = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            if not bare:
                raise RequestError(
                    f"bad_words must hold words with visible characters, got {word!r}", param="bad_words"
                )
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)
        for ids in sequences:
            self._check_ids("bad_words", "tokens of bad_words", ids)
        return sequences

    def _seed_of(self, given: int | None, count: int, index: int) -> int:
        """Return the seed of a choice, a signed 64-bit number.

        Without a seed in the request it depends on the engine's seed and the number of requests before this one.
        """
        if given is not None:
            return (given + index + 2**63 & _MASK) - 2**63
        mixed = self._seed & _MASK
        for part in (count, index):
            mixed = _mix(mixed + 0x9E3779B97F4A7C15 * (part + 1) & _MASK)
        return mixed >> 1


def _mix(x: int) -> int:
    """Apply the finaliser of SplitMix64: flipping an input bit changes half of the output bits on average."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _unwrapped(prompt: Mapping[str, Any]) -> Any:
    """Return the token ids in a prompt object, or else its text."""
    if prompt.get("prompt_token_ids") is not None:
        if isinstance(prompt["prompt_token_ids"], str):
            raise RequestError("prompt_token_ids must be a list of token ids, got a string", param="prompt")
        return prompt["prompt_token_ids"]
    if not isinstance(prompt.get("prompt"), str):
        raise RequestError(
            'a prompt object must hold "prompt" (a string) or "prompt_token_ids" (a list of integers)',
            param="prompt",
        )
    return prompt["prompt"]


def _integers(values: Sequence[Any]) -> list[int]:
    if all(type(v) is int for v in values):
        return list(values)
    try:
        if any(isinstance(v, bool) for v in values):
            raise TypeError
        return [operator.index(v) for v in values]  # accepts numpy's integers, too
    except TypeError:
        wrong = next(v for v in values if isinstance(v, bool) or not hasattr(v, "__index__"))
        raise RequestError(f"prompt_token_ids must hold integers, got {wrong!r}", param="prompt") from None
