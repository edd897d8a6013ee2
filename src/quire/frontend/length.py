"""Limits on text before it is tokenized, which takes seconds per megabyte, and on answers before they run."""

from __future__ import annotations

from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.types import RequestError

_PIECE_CHARS = 65_536
_TYPICAL_CHARS = 4  # of a token: a text of no more than this times the limit is tokenized at once
_CUT_TOKENS = 8  # a cut in the text changes the number of tokens by less than this


def max_chars_of(tokenizer: Tokenizer, max_tokens: int) -> int:
    """Return the number of characters that `max_tokens` tokens can stand for at most."""
    return max_tokens * tokenizer.longest_token_chars


def check_length(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Raise RequestError if `text` certainly has more tokens than fit.

    A text of more characters than that many tokens can have is not tokenized at all. One that may fit is
    counted piece by piece until that is clear, so the work is bounded by the context and not by the text.
    """
    if len(text) <= max_model_len:
        return
    too_long = (
        f"prompt of {len(text)} characters has more than {max_model_len} tokens, which is max_model_len"
    )
    if len(text) > max_chars_of(tokenizer, max_model_len):
        longest = tokenizer.longest_token_chars
        raise RequestError(f"{too_long}: no token of the vocabulary has more than {longest} characters")
    piece = max(_PIECE_CHARS, _TYPICAL_CHARS * max_model_len)
    if len(text) <= piece:
        return
    count = 0
    for start in range(0, len(text), piece):
        count += len(tokenizer.encode(text[start : start + piece], add_special_tokens=False)) - _CUT_TOKENS
        if count >= max_model_len:
            raise RequestError(too_long)


def check_room(field: str, asked: int, prompt_tokens: int, max_model_len: int) -> None:
    """Raise RequestError unless an answer of `asked` tokens, which `field` of the request asks for, fits."""
    room = max_model_len - prompt_tokens
    if asked > room:
        raise RequestError(
            f"{field} must be at most {room}, got {asked}: the prompt has {prompt_tokens} tokens, and both together "
            f"must fit into max_model_len ({max_model_len})"
        )


def last_tokens(tokenizer: Tokenizer, text: str, keep_last: int, add_special_tokens: bool) -> list[int]:
    """Return the last `keep_last` tokens of `text`, tokenizing little more than these."""
    wanted = keep_last + _CUT_TOKENS
    size = _TYPICAL_CHARS * wanted
    while True:
        ids = tokenizer.encode(text[-size:], add_special_tokens)
        if len(ids) >= wanted or size >= min(len(text), max_chars_of(tokenizer, wanted)):
            return ids[-keep_last:]
        size *= 2
