"""The prompts of a request, as jobs for the engine."""

from __future__ import annotations

from typing import Any

from quire.frontend.processor import Prompt
from quire.serve.api.context import ServerContext
from quire.serve.api.protocol.fields import RequestFields
from quire.serve.async_engine import PromptJob
from quire.serve.http.errors import bad_request
from quire.types import Pooling, RequestTargets, SamplingParams


def prompts_of(value: str | list[Any], field: str = "prompt") -> list[Prompt]:
    """Return the prompts in a field that takes a text, token ids, or a list of either.

    Raises:
        ApiError: 400 if `value` is an empty list or mixes the forms; it names `field`.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise bad_request(f"{field} is empty: it needs at least one token", field)
    if len({type(part) for part in value}) > 1:
        raise bad_request(f"{field} must hold either strings, or token ids, or lists of token ids", field)
    if isinstance(value[0], int):
        return [value]
    return value


def length_field(request: object, *names: str) -> str | None:
    """Return the first of the fields `names` that the request sets, or None.

    Routes name the fields that limit the length of the answer.
    """
    return next((name for name in names if getattr(request, name) is not None), None)


def prompt_job(
    server: ServerContext,
    request: RequestFields,
    prompt: Prompt,
    params: SamplingParams,
    *,
    add_special_tokens: bool,
    length_field: str | None = None,
    must_fit: bool = True,
    echo: bool = False,
    pooling: Pooling | None = None,
) -> PromptJob:
    """Return the job for one prompt of a request.

    Args:
        server: the server, for the length of its context.
        request: gives priority, latency targets, cache salt and truncation.
        prompt: a text or token ids.
        params: sampling parameters for every choice.
        add_special_tokens: whether a text gets the tokenizer's special tokens.
        length_field: the field that set `params.max_tokens`; None if it is a default.
        must_fit: refuse a prompt that leaves less room than `length_field` asks for.
        echo: return the text of the prompt.
        pooling: how to pool the hidden states of the prompt; None to generate.
    """
    longest = params.max_tokens if length_field else None
    return PromptJob(
        prompt,
        params,
        request.priority or 0,
        RequestTargets.of_ms(request.target_itl, request.target_ttft),
        request.cache_salt or "",
        add_special_tokens,
        _tokens_to_keep(request.truncate_prompt_tokens, longest, server.engine.info.max_model_len),
        echo,
        pooling,
        length_field if must_fit else None,
        keep_first=request.truncation_side == "right",
    )


def _tokens_to_keep(truncate_prompt_tokens: int | None, longest: int | None, context: int) -> int | None:
    """Return how many tokens of a prompt are kept, or None to keep all.

    -1 keeps what leaves room for an answer of `longest` tokens. If no prompt can leave that much, or `longest` is
    None, it leaves room for one token.
    """
    if truncate_prompt_tokens != -1:
        return truncate_prompt_tokens
    return context - (longest if longest is not None and longest < context else 1)
