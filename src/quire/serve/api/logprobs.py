"""Log-probabilities in the forms of the chat and completions APIs.

JSON has no infinity: -9999 stands for it, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.serve.api.protocol.chat import ChoiceLogprobs, TokenLogprob
from quire.serve.api.protocol.completions import CompletionLogprobs
from quire.types import CompletionOutput, Logprob

_LOWEST = -9999.0
Entry = Mapping[int, Logprob]  # by token id, the chosen token first


def _value(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _text(token: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else entry.decoded_token or ""


def chat_logprobs(
    output: CompletionOutput, top: int, tokenizer: Tokenizer, as_ids: bool, with_end: bool
) -> ChoiceLogprobs:
    """Return the log-probabilities of a chat's tokens.

    Args:
        output: tokens with log-probabilities.
        top: the number of most likely tokens to list for each token, most likely first.
        tokenizer: gives the bytes of tokens.
        as_ids: write tokens as `token_id:N`.
        with_end: include the token that ended the answer, which is not part of its content.
    """
    tokens, entries = output.token_ids, output.logprobs or []
    if output.finish_reason == "stop" and not isinstance(output.stop_reason, str) and not with_end:
        tokens = tokens[:-1]

    def item(token: int, entry: Logprob) -> TokenLogprob:
        return TokenLogprob(_text(token, entry, as_ids), _value(entry), list(tokenizer.token_bytes(token)))

    items = []
    for token, entry in zip(tokens, entries):
        best = sorted((e.rank or 0, t) for t, e in entry.items() if 0 < (e.rank or 0) <= top)[:top]  # ties
        chosen = item(token, entry[token])
        chosen.top_logprobs = [item(t, entry[t]) for _, t in best]
        items.append(chosen)
    return ChoiceLogprobs(items)


def completion_logprobs(
    tokens: Sequence[int],
    entries: Sequence[Entry | None],
    offset: int,
    tokenizer: Tokenizer,
    as_ids: bool,
) -> CompletionLogprobs:
    """Return the log-probabilities of a completion's tokens.

    Args:
        tokens: token ids.
        entries: for each token, the log-probabilities at its position; None for the first token of a prompt.
        offset: the place of the first token in the text of the choice, in characters.
        tokenizer: gives the texts of tokens.
        as_ids: write tokens as `token_id:N`.
    """
    logprobs = CompletionLogprobs([], [], [], [])
    for token, entry in zip(tokens, entries):
        text = tokenizer.token_text(token)
        logprobs.text_offset.append(offset)
        offset += len(text)
        logprobs.tokens.append(f"token_id:{token}" if as_ids else text)
        logprobs.token_logprobs.append(None if entry is None else _value(entry[token]))
        top: dict[str, float] = {}
        for other, logprob in (entry or {}).items():
            name = _text(other, logprob, as_ids)
            top[name] = max(top.get(name, _LOWEST), _value(logprob))
        logprobs.top_logprobs.append(None if entry is None else top)
    return logprobs


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[Any]:
    """Return a prompt's log-probabilities in vLLM's form: by token id, with rank and text; null for the first token."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in entry.items()
        }
        for entry in entries
    ]
