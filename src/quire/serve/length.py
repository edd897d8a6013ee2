"""What does not fit into the context: texts that are much too long, found without tokenising all of them (that takes
seconds per megabyte), and answers that were asked to be longer than what a prompt leaves."""

from __future__ import annotations

from quire.frontend.tokenizer import Tokenizer
from quire.types import RequestError

_PIECE_CHARS = 65_536
_TYPICAL_CHARS = 4  # of a token: a text of no more than this times the context is tokenised at once
_LONGEST_CHARS = 256  # no vocabulary has longer tokens
_CUT_TOKENS = 8  # a cut in the text changes the number of tokens by less than this


def check_length(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Raise RequestError if `text` certainly has more tokens than fit; counts piece by piece until it knows."""
    piece = max(_PIECE_CHARS, _TYPICAL_CHARS * max_model_len)
    if len(text) <= piece:
        return
    count = 0
    for start in range(0, len(text), piece):
        count += len(tokenizer.encode(text[start : start + piece], add_special_tokens=False)) - _CUT_TOKENS
        if count >= max_model_len:
            raise RequestError(
                f"prompt of {len(text)} characters has more than {max_model_len} tokens, which is max_model_len"
            )


def check_room(field: str, asked: int, prompt_tokens: int, max_model_len: int) -> None:
    """Raise RequestError unless an answer of `asked` tokens, which `field` of the request asks for, fits."""
    room = max_model_len - prompt_tokens
    if asked > room:
        raise RequestError(
            f"{field} must be at most {room}, got {asked}: the prompt has {prompt_tokens} tokens, and both together "
            f"must fit into max_model_len ({max_model_len})"
        )


def tail(text: str, keep_last: int) -> str:
    """An ending of `text` that holds its last `keep_last` tokens."""
    return text[-_LONGEST_CHARS * (keep_last + _CUT_TOKENS) :]
