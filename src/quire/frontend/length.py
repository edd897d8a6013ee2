"""Length checks of prompts before tokenization, which takes seconds per megabyte, and of answers before they run."""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.types import RequestError

_PIECE_CHARS = 65_536
_TYPICAL_CHARS = 4  # per token; a text of up to this times the limit is tokenized in one piece
_CUT_TOKENS = 8  # cutting a text changes its number of tokens by less than this


def max_chars_of(tokenizer: Tokenizer, max_tokens: int) -> int:
    """Return an upper bound on the characters of a text of `max_tokens` tokens."""
    return max_tokens * tokenizer.longest_token_chars


def check_length(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Raise RequestError if `text` certainly has more than `max_model_len` tokens.

    A text with too many characters for any tokenization is refused unread. Others are tokenized piece by piece until
    the limit is exceeded, so the work is bounded by the context and not by the length of the text.
    """
    if len(text) <= max_model_len:
        return
    too_long = (
        f"prompt of {len(text)} characters has more than {max_model_len} tokens, the limit (max_model_len)"
    )
    if len(text) > max_chars_of(tokenizer, max_model_len):
        longest = tokenizer.longest_token_chars
        raise _context_exceeded(f"{too_long}: no token of the vocabulary has more than {longest} characters")
    piece = max(_PIECE_CHARS, _TYPICAL_CHARS * max_model_len)
    if len(text) <= piece:
        return
    count = 0
    for start in range(0, len(text), piece):
        count += len(tokenizer.encode(text[start : start + piece], add_special_tokens=False)) - _CUT_TOKENS
        if count > max_model_len:
            raise _context_exceeded(too_long)


def _context_exceeded(message: str) -> RequestError:
    return RequestError(message, param="prompt", code="context_length_exceeded")


def check_room(field: str, max_tokens: int, prompt_tokens: int, max_model_len: int) -> None:
    """Raise RequestError if prompt and answer together do not fit into the context.

    Args:
        field: name of the request field that holds `max_tokens`, for the error.
        max_tokens: requested length of the answer.
        prompt_tokens: length of the prompt in tokens.
        max_model_len: length of the context in tokens.
    """
    room = max_model_len - prompt_tokens
    if max_tokens > room:
        raise RequestError(
            f"{field} must be at most {room}, got {max_tokens}: the prompt has {prompt_tokens} tokens, and both "
            f"together must fit into max_model_len ({max_model_len})",
            param=field,
            code="context_length_exceeded",
        )


def last_tokens(tokenizer: Tokenizer, text: str, keep_last: int, add_special_tokens: bool) -> list[int]:
    """Return the last `keep_last` tokens of `text`. Tokenizes only slightly more than its end."""
    return _edge_tokens(tokenizer, text, keep_last, add_special_tokens, lambda size: text[-size:])[
        -keep_last:
    ]


def first_tokens(tokenizer: Tokenizer, text: str, keep_first: int, add_special_tokens: bool) -> list[int]:
    """Return the first `keep_first` tokens of `text`. Tokenizes only slightly more than its beginning."""
    return _edge_tokens(tokenizer, text, keep_first, add_special_tokens, lambda size: text[:size])[
        :keep_first
    ]


def _edge_tokens(
    tokenizer: Tokenizer, text: str, keep: int, add_special_tokens: bool, cut: Callable[[int], str]
) -> list[int]:
    """Return at least `keep` tokens of one end of `text`, or all it has; `cut(n)` returns n characters of that end."""
    needed = keep + _CUT_TOKENS
    size = _TYPICAL_CHARS * needed
    while True:
        ids = tokenizer.encode(cut(size), add_special_tokens)
        if len(ids) >= needed or size >= min(len(text), max_chars_of(tokenizer, needed)):
            return ids
        size *= 2
