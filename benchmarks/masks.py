"""Measure the processor time of the masks of structured output, per row, beside the library's own.

    python benchmarks/masks.py TOKENIZER_FOLDER [--rows 32]

Each row follows the tokens of a valid answer to its schema. "library" is llguidance alone: the token before, and the mask.
"Quire" adds what an answer needs besides: end rules, time budget, the array of the step. "step" is the time of the thread
that waits for the masks of all rows, per row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from quire.frontend.tokenizer.tokenizer import Tokenizer, load_tokenizer
from quire.grammar.answer import GrammarAnswer
from quire.grammar.compiler import CheckedGrammar
from quire.grammar.mask_threads import MaskThreads
from quire.grammar.matching import Vocabulary, build_matcher, grammar_text
from quire.types import EngineOutput, EngineRequest, GrammarSpec, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "email", "tags", "active"],
    "additionalProperties": False,
}
ANSWER = {
    "name": "Ada Lovelace, Countess of the Analytical Engine",
    "age": 36,
    "email": "ada@example.org",
    "tags": ["mathematics", "poetical science", "computing"],
    "active": True,
}
WORDS = [f"{first}-{second}" for first in ("red", "green", "blue") for second in range(1000)]
NOTE = {"type": "object", "properties": {"note": {"type": "string", "maxLength": 2000}}, "required": ["note"]}
CASES = {
    "object of five fields": (PERSON, ANSWER),
    "enum of 3,000 strings": (
        {"type": "array", "items": {"enum": WORDS}},
        [WORDS[i * 37] for i in range(20)],
    ),
    "anyOf of 100 objects": (
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {f"kind{i}": {"type": "string"}, "value": {"type": "number"}},
                    "required": [f"kind{i}", "value"],
                    "additionalProperties": False,
                }
                for i in range(100)
            ]
        },
        {"kind77": "a longer text of a few words", "value": 12.5},
    ),
    "string with maxLength 2,000": (
        NOTE,
        {"note": "It was the best of times, it was the worst of times. " * 4},
    ),
}


class _Source:
    """The answers' view of a checked grammar."""

    def __init__(self, vocabulary: Vocabulary, spec: GrammarSpec) -> None:
        self.vocabulary, self._spec, self._text = vocabulary, spec, grammar_text(spec)
        self.memory_bytes = 0

    def matcher(self, max_lexer_states: int) -> LLMatcher:
        return build_matcher(self.vocabulary, self._spec, self._text, max_lexer_states)


def library_us(source: _Source, ids: list[int], rows: int, size: int) -> list[float]:
    matchers = [source.matcher(50_000) for _ in range(rows)]
    bits = np.zeros(size // 32 + 1, np.uint32)
    times = []
    for at in range(len(ids)):
        for matcher in matchers:
            begin = time.thread_time_ns()
            if at:
                matcher.consume_token(ids[at - 1])
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            times.append((time.thread_time_ns() - begin) / 1e3)
    return times


def answer_us(
    source: CheckedGrammar, ids: list[int], rows: int, size: int
) -> tuple[list[float], list[float]]:
    """Return the processor times of all masks in microseconds, and the waiting time of each step per row."""
    params = SamplingParams(max_tokens=len(ids))
    answers = [
        GrammarAnswer(EngineRequest(str(i), [1], params, eos_ids=[size - 2]), source, size)
        for i in range(rows)
    ]
    times, waits = [], []
    threads = MaskThreads(threading.Event(), 1.0)
    for at, token in enumerate(ids):
        for answer in answers:
            answer.slow = False
        if at % 2:  # every second step by the threads, as the engine does
            begin = time.perf_counter_ns()
            assert not threads.run(answers)
            waits.append((time.perf_counter_ns() - begin) / 1e3 / rows)
        else:
            for answer in answers:
                begin = time.thread_time_ns()
                answer.work()
                times.append((time.thread_time_ns() - begin) / 1e3)
        for answer in answers:
            assert answer.error is None, (at, answer.error)
            answer.use()
            assert answer.accepts(EngineOutput(answer.request_id, [token])), (at, token)
    threads.close()
    return times, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer)
    assert isinstance(tokenizer, Tokenizer)
    size = 151_936
    special = tokenizer.special_ids
    vocabulary = Vocabulary([b"" if i in special else tokenizer.token_bytes(i) for i in range(size)])
    print(
        f"{'schema':<30}{'library mean':>13}{'p99':>7}{'Quire mean':>12}{'p99':>7}{'step per row':>14}   (us)"
    )
    for name, (schema, value) in CASES.items():
        source = _Source(vocabulary, GrammarSpec("json", json.dumps(schema)))
        ids = tokenizer.encode(json.dumps(value), False)
        alone = library_us(source, ids, args.rows, vocabulary.end)
        ours, waits = answer_us(source, ids, args.rows, vocabulary.end)
        first, second = (statistics.quantiles(times[2 * args.rows :], n=100) for times in (alone, ours))
        print(
            f"{name:<30}{statistics.fmean(alone[args.rows :]):>13.1f}{first[98]:>7.0f}"
            f"{statistics.fmean(ours[args.rows :]):>12.1f}{second[98]:>7.0f}{statistics.fmean(waits[1:]):>14.1f}"
        )


if __name__ == "__main__":
    main()
