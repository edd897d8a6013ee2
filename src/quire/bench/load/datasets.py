"""Datasets of requests: random prompts, recorded conversations, and files of prompts.

Random prompts are token ids, so they have exactly the requested length. A chat endpoint takes only text, so it gets the
decoded ids and may count a few tokens more or less.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.load.workloads import Workload
from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.types import ConfigError

# Limits of a ShareGPT prompt, and of prompt and answer together, as in vLLM's benchmark.
_MOST_TOKENS = (1024, 2048)
_LEAST_TOKENS = 4


@dataclass(slots=True)
class BenchRequest:
    """A request of a load. `prompt_len` is in tokens, an estimate until the server reports it."""

    number: int
    prompt: str | Sequence[int]
    prompt_len: int
    output_len: int


def random_work(
    vocab: int,
    count: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> Workload:
    """Generate prompts of random token ids.

    Args:
        vocab: number of token ids to draw from.
        count: number of requests.
        input_len: mean length of a prompt in tokens, without the prefix.
        output_len: mean length of an answer in tokens.
        range_ratio: lengths are uniform between (1 - range_ratio) and (1 + range_ratio) times the mean; 0 to below 1.
        prefix_len: length of a prefix that all prompts share, in tokens.
        seed: of the random numbers.
    """
    r = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, r.randint(round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))))

    prefix = _ids(r, vocab, prefix_len)
    return [(prefix + _ids(r, vocab, length(input_len)), length(output_len)) for _ in range(count)]


def prefix_repetition(
    vocab: int,
    count: int,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    *,
    seed: int = 0,
) -> Workload:
    """Generate prompts with `num_prefixes` prefixes, each shared by count / num_prefixes prompts, shuffled."""
    r = random.Random(seed)
    prefixes = [_ids(r, vocab, prefix_len) for _ in range(num_prefixes)]
    work: Workload = [
        (prefixes[i % num_prefixes] + _ids(r, vocab, suffix_len), output_len) for i in range(count)
    ]
    r.shuffle(work)
    return work


def _ids(r: random.Random, vocab: int, count: int) -> list[int]:
    return [r.randrange(vocab) for _ in range(count)]


def to_requests(work: Workload, tokenizer: Tokenizer | None = None) -> list[BenchRequest]:
    """Convert a workload to requests with token ids or, given a tokenizer, with text."""
    found = []
    for number, (ids, output_len) in enumerate(work):
        prompt = list(ids) if tokenizer is None else tokenizer.decode(list(ids)) or "."
        found.append(BenchRequest(number, prompt, len(ids), output_len))
    return found


def sharegpt(
    path: Path, count: int, tokenizer: Tokenizer, output_len: int | None = None, seed: int = 0
) -> list[BenchRequest]:
    """Read requests from a ShareGPT file: the first question of each conversation, in random order.

    Very short and very long conversations are skipped, as in vLLM's benchmark.

    Args:
        path: the file, a JSON list or JSON lines.
        count: number of requests; the conversations repeat if there are fewer.
        tokenizer: for the lengths of prompts and answers.
        output_len: tokens per answer; None for the length of the recorded answer.
        seed: of the order.

    Raises:
        ConfigError: if the file cannot be read or holds no suitable conversation.
    """
    conversations = [found for entry in _entries(path) if len(found := _turns(entry)) >= 2]
    random.Random(seed).shuffle(conversations)
    requests: list[BenchRequest] = []
    for question, reply, *_ in conversations:
        if len(requests) == count:
            break
        prompt_len = len(tokenizer.encode(question))
        wanted = output_len or len(tokenizer.encode(reply, False))
        most_in, most = _MOST_TOKENS
        if min(prompt_len, wanted) >= _LEAST_TOKENS and prompt_len <= most_in and prompt_len + wanted <= most:
            requests.append(BenchRequest(len(requests), question, prompt_len, wanted))
    if not requests:
        raise ConfigError(
            f"{path} holds no conversation that could be sent: a ShareGPT file is a list of objects with "
            '"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]'
        )
    return repeated(requests, count)


def _turns(entry: Any) -> list[str]:
    turns = entry.get("conversations") or entry.get("conversation") if isinstance(entry, dict) else None
    found = [turn.get("value") or turn.get("content") for turn in turns or [] if isinstance(turn, dict)]
    return [text for text in found if isinstance(text, str) and text]


def custom(path: Path, count: int, tokenizer: Tokenizer | None, output_len: int) -> list[BenchRequest]:
    """Read requests from JSON lines with a "prompt" and an optional "output_tokens".

    Args:
        path: the file, JSON lines or a JSON list.
        count: number of requests; the prompts repeat if there are fewer.
        tokenizer: for the lengths of prompts; None counts words.
        output_len: tokens per answer where a line has no "output_tokens".

    Raises:
        ConfigError: if the file cannot be read, holds no prompts, or has a line without one.
    """
    requests: list[BenchRequest] = []
    for entry in _entries(path):
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{path} must hold JSON lines with a "prompt" that is text')
        prompt_len = len(tokenizer.encode(prompt)) if tokenizer else len(prompt.split())
        requests.append(
            BenchRequest(len(requests), prompt, prompt_len, int(entry.get("output_tokens") or output_len))
        )
    if not requests:
        raise ConfigError(f"{path} holds no prompts")
    return repeated(requests, count)


def _entries(path: Path) -> Iterator[Any]:
    """Yield the objects of a JSON list or of JSON lines. Raise ConfigError if the file is neither."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            yield from map(json.loads, filter(str.strip, text.splitlines()))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from None


def repeated(requests: Sequence[BenchRequest], count: int, skip: int = 0) -> list[BenchRequest]:
    """Return `count` requests from index `skip` on, starting again at the first when they run out."""
    chosen = (requests[(skip + i) % len(requests)] for i in range(count))
    return [
        BenchRequest(i, request.prompt, request.prompt_len, request.output_len)
        for i, request in enumerate(chosen)
    ]
