"""What a server is asked: made-up prompts, recorded conversations, or files of prompts.

Made-up prompts are token ids, so that they have exactly the length that was asked for; a chat, which takes
text only, gets what a tokenizer makes of them, and may count a few tokens more or less.
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

_MOST_TOKENS = (1024, 2048)  # of a ShareGPT prompt, and of prompt and answer, as in vLLM's benchmark
_LEAST_TOKENS = 4


@dataclass(slots=True)
class BenchRequest:
    """One request. `prompt_len` is in tokens, as far as it is known before the server says it."""

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
    """Random ids. Lengths are uniform within `range_ratio` (0 to below 1) around those given; all prompts begin with the
    same `prefix_len` tokens."""
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
    """Prompts of which `count / num_prefixes` each share a prefix, shuffled."""
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
    """Requests for `work`: as token ids or, if there is a tokenizer, as text."""
    found = []
    for number, (ids, output_len) in enumerate(work):
        prompt = list(ids) if tokenizer is None else tokenizer.decode(list(ids)) or "."
        found.append(BenchRequest(number, prompt, len(ids), output_len))
    return found


def sharegpt(
    path: Path, count: int, tokenizer: Tokenizer, output_len: int | None = None, seed: int = 0
) -> list[BenchRequest]:
    """The first question of each conversation of a ShareGPT file, in random order; the answer is as long as the
    recorded one, or `output_len` tokens. Very short and long ones are left out, as in vLLM's benchmark."""
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
    """JSON lines with "prompt" and, if they like, "output_tokens"."""
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
    """The objects of a JSON list, or of JSON lines. Raises ConfigError if the file is neither."""
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
    """`count` requests from place `skip` on, from the beginning again where they run out."""
    chosen = (requests[(skip + i) % len(requests)] for i in range(count))
    return [
        BenchRequest(i, request.prompt, request.prompt_len, request.output_len)
        for i, request in enumerate(chosen)
    ]
