"""The sampling fields of a request, as SamplingParams.

The request's values replace the model's defaults, which replace Quire's. A field for something that Quire does not
implement is an error, never ignored in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.serve.answer.tools.schema_check import wrong_type
from quire.serve.api.protocol.fields import RequestFields, SamplingFields
from quire.serve.api.structured_fields import structured_outputs
from quire.serve.http.errors import bad_request
from quire.types import MAX_LOGPROBS, RequestError, SamplingParams

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
# Fields that Quire does not implement, with the values besides null that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "logprob_token_ids": ([],),
    "kv_transfer_params": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "return_hidden_states": (False,),
    "return_token_offsets": (False,),
    "lora_path": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
_MAX_STOPS, _MAX_STOP_CHARS, _MAX_BAD_WORDS, _MAX_SALT_CHARS = 64, 512, 1024, 1024
MAX_CHOICES = 2048
TRUNCATION_SIDES = ("left", "right")


def check_fields(request: SamplingFields) -> None:
    """Raise ApiError 400 for fields that exclude each other, are out of range, or are not implemented."""
    for name, harmless in REFUSED.items():
        value = getattr(request, name, None)
        if value is not None and value not in harmless:
            raise bad_request(f"{name} is not available in Quire", name)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs cannot be streamed: set stream to false", "prompt_logprobs")
    check_request(request)
    if request.stream_interval is not None and request.stream_interval < 1:
        raise bad_request(
            f"stream_interval must be at least 1, got {request.stream_interval}", "stream_interval"
        )
    _check_words(request)


def check_request(request: RequestFields) -> None:
    """Raise ApiError 400 for the fields of every route that are out of range."""
    if request.cache_salt is not None and not 0 < len(request.cache_salt) <= _MAX_SALT_CHARS:
        raise bad_request(
            f"cache_salt must have 1 to {_MAX_SALT_CHARS} characters, got {len(request.cache_salt)}",
            "cache_salt",
        )
    if request.timeout is not None and not 0 < request.timeout <= 1e6:
        raise bad_request(
            f"timeout must be above 0 and at most 1e6 seconds, got {request.timeout}", "timeout"
        )
    for name in ("target_itl", "target_ttft"):
        target = getattr(request, name)
        if target is not None and not 0 < target <= 1e6:
            raise bad_request(f"{name} must be above 0 and at most 1e6 ms, got {target}", name)
    if request.priority is not None and abs(request.priority) > 2**31:
        raise bad_request(f"priority must be between -2**31 and 2**31, got {request.priority}", "priority")
    if request.request_id is not None and not 0 < len(request.request_id) <= 128:
        raise bad_request(
            f"request_id must have 1 to 128 characters, got {len(request.request_id)}", "request_id"
        )
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1 and keep < 1:
        raise bad_request(
            f"truncate_prompt_tokens must be -1 or at least 1, got {keep}", "truncate_prompt_tokens"
        )
    if request.truncation_side not in (None, *TRUNCATION_SIDES):
        raise bad_request(
            f"truncation_side must be left or right, got {request.truncation_side[:16]!r}", "truncation_side"
        )


def _check_words(request: SamplingFields) -> None:
    """Raise ApiError 400 for too many or too long stop strings and bad words.

    The event loop searches for stop strings at every token, so their number is bounded.
    """
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARS for stop in stops):
        raise bad_request(
            f"stop must hold at most {_MAX_STOPS} strings of at most {_MAX_STOP_CHARS} characters", "stop"
        )
    words = request.bad_words or []
    if len(words) > _MAX_BAD_WORDS or any(len(word) > _MAX_STOP_CHARS for word in words):
        raise bad_request(
            f"bad_words must hold at most {_MAX_BAD_WORDS} words of at most {_MAX_STOP_CHARS} characters",
            "bad_words",
        )


def sampling_params(
    request: SamplingFields,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    max_logprobs: int,
    vocab_size: int,
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        request: its fields.
        defaults: the model's defaults.
        max_tokens: the limit on the answer, from the route's field.
        logprobs: the number of log-probabilities per token, from the route's field.
        max_logprobs: the server's limit on those; negative for none.
        vocab_size: of the model.

    Raises:
        ApiError: 400 for a value out of range.
        RequestError: for a value that SamplingParams refuses.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs == -1:
        prompt_logprobs = vocab_size
    most = MAX_LOGPROBS if max_logprobs < 0 else max_logprobs
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and value > most:
            shown = f"-1, which is all {value}" if getattr(request, name, None) == -1 else value
            raise bad_request(f"{name} must be at most {most} (max_logprobs), got {shown}", name)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        if len(given.get(name, ())) > vocab_size:
            raise bad_request(
                f"{name} must hold at most {vocab_size} ids (the vocabulary), got {len(given[name])}", name
            )
    bias = given.get("logit_bias")
    if bias is not None and any(not math.isfinite(value) for value in bias.values()):
        raise bad_request("logit_bias must hold finite numbers", "logit_bias")
    structured = structured_outputs(request)
    if structured is not None and (wrong := wrong_type(structured.json)) is not None:
        raise RequestError(f"json schema: {wrong}", param="structured_outputs")
    return SamplingParams(
        **{
            **defaults,
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "structured_outputs": structured,
        }
    )
