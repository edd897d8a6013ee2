"""Acceptance of draft tokens, and drafters, on the CPU."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.sampling.sampler import Sampler
from quire.speculation.drafter import DraftRows
from quire.speculation.ngram import NgramDrafter
from quire.speculation.suffix import SuffixDrafter
from quire.types import EngineRequest, SamplingParams, SlotAdmission
from quire.worker.step.torch_batch import accepted_counts

CPU = torch.device("cpu")


class TokenTable:
    """Token columns of `slots` slots that begin with the same prompt."""

    def __init__(self, slots: int, length: int, prompt: list[int]) -> None:
        self.tokens = torch.zeros(slots, length, dtype=torch.int32)
        self.tokens[:, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.num_tokens = torch.full((slots,), len(prompt), dtype=torch.int32)
        self.prompt_len = self.num_tokens.clone()


def test_tokens_are_accepted_up_to_the_first_that_differs() -> None:
    sampled = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [-1, 6, 7]], dtype=torch.int32)
    drafted = torch.tensor([[5, 6, 0], [5, 9, 0], [9, 6, 0], [5, 6, 7], [5, 6, 7]], dtype=torch.int32)
    drafts = torch.tensor([2, 2, 2, 1, 2])
    assert accepted_counts(sampled, drafted, drafts).tolist() == [3, 2, 1, 2, 1]
    assert accepted_counts(sampled, drafted, torch.zeros(5, dtype=torch.int64)).tolist() == [1] * 5


VOCAB, DRAWS, PROMPT = 6, 20_000, [1, 2, 2, 4]


class Chain:
    """A model whose next token depends on the last one, sampled in `DRAWS` slots of different seeds."""

    def __init__(self, params: SamplingParams) -> None:
        rng = np.random.default_rng(3)
        self.logits = torch.from_numpy(rng.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32))
        self.columns = TokenTable(DRAWS, 16, PROMPT)
        self.sampler = Sampler(self.columns, VOCAB, DRAWS, CPU)
        for slot in range(DRAWS):
            self.sampler.admit(slot, EngineRequest("r", PROMPT, params, seed=slot * 7919))
        self.sampler.flush()

    def sample(self, last: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        return self.sampler.sample(self.logits[last.long()], slots.numpy(), slots, lengths=lengths).tokens

    def plain(self, count: int) -> Tensor:
        """Decode `count` tokens, one a step. Return int32 [draws, count]."""
        every = torch.arange(DRAWS)
        for _ in range(count):
            known = self.columns.num_tokens
            last = self.columns.tokens[every, known.long() - 1]
            self.columns.tokens[every, known.long()] = self.sample(last, every, known)
            known += 1
        return self.columns.tokens[:, len(PROMPT) : len(PROMPT) + count].clone()

    def drafted(self, count: int, depth: int) -> Tensor:
        """Decode `count` tokens in steps that verify `depth` random drafts. Return int32 [draws, count]."""
        rng = torch.Generator().manual_seed(5)
        slots, tokens, known = torch.arange(DRAWS), self.columns.tokens, self.columns.num_tokens
        drafts = torch.full((DRAWS,), depth)
        while int(known.min()) < len(PROMPT) + count:
            offsets = torch.arange(depth + 1)
            places = (known.unsqueeze(1) + offsets).clamp(max=15)
            guesses = torch.randint(0, VOCAB, (DRAWS, depth), generator=rng, dtype=torch.int32)
            tokens[slots.unsqueeze(1), places[:, :depth]] = guesses
            last = tokens[slots.unsqueeze(1), places - 1].flatten()
            flat = self.sample(last, slots.repeat_interleave(depth + 1), places.flatten().int())
            sampled = flat.view(DRAWS, depth + 1)
            kept = accepted_counts(sampled, tokens[slots.unsqueeze(1), places], drafts)
            keeps = offsets < kept.unsqueeze(1)
            rows = slots.unsqueeze(1).expand_as(places)
            tokens[rows[keeps], places[keeps]] = sampled[keeps]
            known += torch.where(known < 15 - depth, kept, 0).int()
        return tokens[:, len(PROMPT) : len(PROMPT) + count].clone()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.8},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2, "temperature": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    ],
    ids=lambda values: next(iter(values)),
)
def test_drafts_change_no_drawn_token(values: dict[str, float]) -> None:
    """The tokens are those of plain decoding with the same seeds, so their distribution is, too."""
    plain = Chain(SamplingParams(**values)).plain(3)
    drafted = Chain(SamplingParams(**values)).drafted(3, depth=2)
    assert torch.equal(plain, drafted)


def test_drafted_tokens_have_the_probabilities_of_the_model() -> None:
    """Chi-squared over 20,000 seeds, of the first two tokens together."""
    chain = Chain(SamplingParams(temperature=0.7))
    pairs = chain.drafted(2, depth=2).long()
    probability = (chain.logits / 0.7).double().softmax(1)
    first = probability[PROMPT[-1]]
    expected = (first.unsqueeze(1) * probability).flatten() * DRAWS
    counts = (pairs[:, 0] * VOCAB + pairs[:, 1]).bincount(minlength=VOCAB * VOCAB).double()
    chi_squared = float(((counts - expected).square() / expected).sum())
    assert chi_squared < 66.6, "p < 0.001 with 35 degrees of freedom"


def proposed(prompt: list[int], count: int) -> list[int]:
    columns = TokenTable(3, 40, prompt)
    rows = DraftRows(torch.tensor([2]), torch.tensor([count]), count, 40)
    NgramDrafter(columns, CPU).propose(rows)
    assert not columns.tokens[:2, len(prompt) :].any(), "another slot has drafts"
    return columns.tokens[2, len(prompt) : len(prompt) + count].tolist()


def test_ngram_drafts_what_followed_the_longest_and_latest_occurrence() -> None:
    assert proposed([7, 8, 9, 1, 2, 7, 8], 3) == [9, 1, 2]
    assert proposed([5, 7, 8, 1, 6, 7, 8, 2, 9, 7, 8], 1) == [2], "the latest of equally long ones"
    assert proposed([4, 7, 8, 1, 3, 8, 2, 4, 7, 8], 1) == [1], "the longer match wins"
    assert proposed([3, 3, 3], 4) == [3, 3, 3, 3], "a copy that reaches the end repeats itself"
    assert proposed([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_ngram_writes_nothing_behind_the_column() -> None:
    columns = TokenTable(2, 8, [1, 2, 3, 1, 2, 3, 1])
    before = columns.tokens.clone()
    NgramDrafter(columns, CPU).propose(DraftRows(torch.tensor([0]), torch.tensor([5]), 5, 8))
    assert columns.tokens[0, 7] == 2 and torch.equal(columns.tokens[1], before[1])


def test_ngram_agrees_with_a_naive_search() -> None:
    rng = random.Random(1)
    for _ in range(60):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        best = max(
            (
                (length, end)
                for end in range(1, len(prompt))
                for length in range(1, 5)
                if suffix(prompt, end, length)
            ),
            default=(0, 0),
        )
        source = best[1] if best[0] else 0
        period = max(len(prompt) - source, 1)
        assert proposed(prompt, 4) == [prompt[source + j % period] for j in range(4)]


def suffix(prompt: list[int], end: int, length: int) -> bool:
    """Return whether the `length` tokens before `end` are the last ones of the prompt."""
    return end >= length and prompt[end - length : end] == prompt[len(prompt) - length :]


class SuffixBench:
    """A `SuffixDrafter` over four slots, and the requests that take them."""

    def __init__(self, answers: int = 3) -> None:
        self.columns = TokenTable(4, 40, [])
        self.drafter = SuffixDrafter(self.columns, CPU, answers)

    def ask(self, slot: int, client: str, prompt: list[int], answer: list[int] = []) -> None:  # noqa: B006
        request = EngineRequest("r", prompt, SamplingParams(), client=client)
        self.drafter.admit([SlotAdmission(slot, array("i", prompt), len(prompt), 0, [[]], request)])
        tokens = prompt + answer
        self.columns.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.columns.num_tokens[slot], self.columns.prompt_len[slot] = len(tokens), len(prompt)

    def drafts(self, slot: int, count: int) -> list[int]:
        known = int(self.columns.num_tokens[slot])
        self.drafter.propose(DraftRows(torch.tensor([slot]), torch.tensor([count]), count, 40))
        return self.columns.tokens[slot, known : known + count].tolist()


ANSWER = [11, 12, 13, 14, 15, 16, 17]


def test_suffix_drafts_what_followed_in_earlier_answers_of_the_client() -> None:
    bench = SuffixBench()
    bench.ask(0, "ann", [1, 2, 3], ANSWER)
    bench.ask(0, "ann", [5, 11, 12, 13, 14])
    assert bench.drafts(0, 3) == [15, 16, 17]
    bench.ask(1, "bob", [5, 11, 12, 13, 14])
    assert bench.drafts(1, 3) != [15, 16, 17], "another client's answer was used"
    bench.ask(2, "ann", [5, 12, 13, 14])
    assert bench.drafts(2, 2) != [15, 16], "three tokens are too few"


def test_suffix_ends_with_the_answer_and_prefers_the_longer_match() -> None:
    bench = SuffixBench()
    bench.ask(0, "ann", [1], [21, 22, 23, 24, 25, 31, 32])
    bench.ask(0, "ann", [1], [99, 22, 23, 24, 25, 41, 42])
    bench.ask(0, "ann", [21, 22, 23, 24, 25])
    assert bench.drafts(0, 2) == [31, 32]
    bench.ask(0, "ann", [7, 23, 24, 25, 41, 42])
    assert bench.drafts(0, 2) == [7, 23], "nothing follows, so the request's own tokens are searched"


def test_suffix_replaces_the_answer_that_was_matched_longest_ago() -> None:
    bench = SuffixBench(answers=2)
    for first in (10, 20):
        bench.ask(0, "ann", [1], [first + i for i in range(8)])
    bench.ask(0, "ann", [10, 11, 12, 13])
    assert bench.drafts(0, 2) == [14, 15]
    bench.ask(1, "ann", [1], [30 + i for i in range(8)])
    bench.ask(1, "ann", [20, 21, 22, 23])
    assert bench.drafts(1, 2) != [24, 25], "the least recently used answer is still there"
    bench.ask(2, "ann", [10, 11, 12, 13])
    assert bench.drafts(2, 2) == [14, 15]
