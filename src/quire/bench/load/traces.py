"""Traces of real services: the lengths and arrival times of their requests.

There are two formats, recognized by their content. Azure LLM inference traces are CSV with TIMESTAMP (date and time),
ContextTokens and GeneratedTokens. Mooncake traces are JSON lines with timestamp (milliseconds), input_length,
output_length and hash_ids, one id for each block of 512 prompt tokens; equal ids mean equal blocks.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from quire.bench.load.workloads import Workload
from quire.types import ConfigError

BLOCK = 512  # prompt tokens that a hash id of a Mooncake trace stands for


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace. `blocks` holds the ids of the prompt's blocks, or nothing if the trace has no ids."""

    at_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRequest]:
    """Read the requests of a trace, ordered by time, the first at 0 s. Raise ConfigError for any other file."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = list(_mooncake(text) if text.lstrip().startswith("{") else _azure(text))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is neither an Azure trace (CSV with TIMESTAMP, ContextTokens and GeneratedTokens) nor a "
            f"Mooncake trace (JSON lines with timestamp, input_length, output_length, hash_ids): {error!r}"
        ) from None
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    begin = min(row.at_s for row in rows)
    return sorted((replace(row, at_s=row.at_s - begin) for row in rows), key=lambda row: row.at_s)


def _azure(text: str) -> Iterable[TraceRequest]:
    for row in csv.DictReader(text.splitlines()):
        at = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC)
        yield TraceRequest(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(text: str) -> Iterable[TraceRequest]:
    for line in filter(str.strip, text.splitlines()):
        row = json.loads(line)
        length, ids = row["input_length"], tuple(row.get("hash_ids", ()))
        if ids and len(ids) != -(-length // BLOCK):
            raise ValueError(f"{len(ids)} hash_ids for {length} tokens")
        yield TraceRequest(row["timestamp"] / 1000, length, row["output_length"], ids)


def replay(
    rows: list[TraceRequest], vocab: int, max_len: int, count: int | None = None, scale: float = 1.0
) -> tuple[Workload, list[float], int]:
    """Generate a workload with the lengths, times and shared blocks of a trace.

    Prompts are random: the tokens of a block follow from its id, and those of a prompt without ids from its index.

    Args:
        rows: the requests of the trace, ordered by time.
        vocab: number of token ids to draw from.
        max_len: limit of prompt and answer together, in tokens; longer requests are skipped.
        count: number of requests; None for all.
        scale: replay the trace this many times as fast as recorded.

    Returns:
        The workload, the arrival times in seconds (the first at 0), and the number of skipped requests.

    Raises:
        ConfigError: if no request fits.
    """
    chosen: list[TraceRequest] = []
    too_long = 0
    for row in rows:
        if len(chosen) == count:
            break
        if row.input_len + row.output_len > max_len or not (row.input_len and row.output_len):
            too_long += 1
        else:
            chosen.append(row)
    if not chosen:
        raise ConfigError(f"no request of the trace fits into max_model_len {max_len}")
    block = lru_cache(maxsize=4096)(lambda name: _tokens(vocab, BLOCK, 0, name))
    work: Workload = []
    for index, row in enumerate(chosen):
        if row.blocks:
            prompt = array("i", chain.from_iterable(map(block, row.blocks)))[: row.input_len]
        else:
            prompt = _tokens(vocab, row.input_len, 1, index)
        work.append((prompt, row.output_len))
    return work, [(row.at_s - chosen[0].at_s) / scale for row in chosen], too_long


def _tokens(vocab: int, count: int, *seed: int) -> array[int]:
    """Generate `count` token ids that depend only on `seed`."""
    return array("i", np.random.default_rng(seed).integers(0, vocab, count, np.int32).tobytes())
