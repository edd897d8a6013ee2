"""Kernels around a draft head against `PlainPairs` and plain PyTorch."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from quire.attention.base import ForwardBatch
from quire.speculation.drafter import DraftContext, DraftRows
from quire.speculation.head_pairs import KernelPairs, PlainPairs, StateRing

pytest.importorskip("triton")

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]
pytestmark = pytest.mark.parametrize("device", DEVICES)
SLOTS, LENGTH, BLOCK, BLOCKS, WIDTH = 7, 60, 4, 20, 24


class NoPlan:
    """A back end that plans nothing."""

    plans_blocks = False

    def plan(self, batch: ForwardBatch) -> None:
        return None


def make_context(rng: random.Random, groups: int, device: str) -> DraftContext:
    entries = torch.randint(
        0, 50, (SLOTS, groups * BLOCKS), generator=torch.Generator().manual_seed(rng.randrange(99))
    )
    entries = entries.int().to(device)
    columns = SimpleNamespace(
        tokens=torch.randint(0, 99, (SLOTS, LENGTH)).int().to(device),
        num_tokens=torch.tensor([rng.choice([1, 2, 5, 30, LENGTH - 5, LENGTH]) for _ in range(SLOTS)])
        .int()
        .to(device),
        block_tables=[entries[:, g * BLOCKS : (g + 1) * BLOCKS] for g in range(groups)],
    )
    return cast(DraftContext, SimpleNamespace(
        columns=columns, block_size=BLOCK, kv=[], group_of=[0], device=torch.device(device), vocab_size=99
    ))  # fmt: skip


def make_ring(rng: random.Random, device: str, reach: int = 9) -> StateRing:
    begins = torch.tensor([rng.choice([0, 0, 3, 40]) for _ in range(SLOTS)], device=device)
    return StateRing(torch.zeros(SLOTS * reach, WIDTH, device=device), begins, reach)


@pytest.mark.parametrize("seed", range(6))
def test_pairs_and_drafts_are_those_of_plain_torch(seed: int, device: str) -> None:
    rng = random.Random(seed)
    context, ring = make_context(rng, 1 + seed % 2, device), make_ring(rng, device)
    one, other = (kind(context, cast(Any, NoPlan()), ring) for kind in (PlainPairs, KernelPairs))
    slots = rng.sample(range(SLOTS - 1), 3 + seed % 3)
    header = torch.tensor([[slot, rng.randrange(4)] for slot in slots], dtype=torch.int32, device=device)
    rows = DraftRows(header[:, 0], header[:, 1], 3, LENGTH)
    known = context.columns.tokens.clone()
    for draft in range(3):
        for width in (1, 4, 8) if draft == 0 else (1,):
            a, b = one.make(rows, draft, width), other.make(rows, draft, width)
            names = ["input_ids", "positions", "kv_slots", "query_start", "seq_lens", "slots", "logit_index"]
            for name in names:
                assert torch.equal(getattr(a.batch, name), getattr(b.batch, name)), name
                assert getattr(a.batch, name).dtype == getattr(b.batch, name).dtype, name
            for left, right in zip(a.batch.others, b.batch.others, strict=True):
                assert torch.equal(left.kv_slots, right.kv_slots)
            assert torch.equal(a.places, b.places) and torch.equal(a.lengths, b.lengths)
            assert np.array_equal(a.batch.seq_bounds, b.batch.seq_bounds)
        drafts = torch.tensor([rng.choice([-2, 5, 77]) for _ in slots], dtype=torch.int32, device=device)
        before = context.columns.tokens.clone()
        one.write(rows, a, drafts, draft)
        written = context.columns.tokens.clone()
        context.columns.tokens.copy_(before)
        other.write(rows, b, drafts, draft)
        assert torch.equal(context.columns.tokens, written)
    assert not torch.equal(context.columns.tokens, known) or not int(header[:, 1].max())


@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 3], [20, 2]], ids=str)
def test_the_newest_states_of_each_row_are_kept(counts: list[int], device: str) -> None:
    rng = random.Random(sum(counts))
    context, total = make_context(rng, 1, device), sum(counts) + 2  # two tokens of padding
    starts = np.array([rng.randrange(10) for _ in counts])
    positions = np.concatenate(
        [start + np.arange(n) for start, n in zip(starts, counts)] + [np.zeros(2, int)]
    )
    bounds = np.cumsum([0, *counts])
    batch = cast(ForwardBatch, SimpleNamespace(
        positions=torch.from_numpy(positions).to(device),
        kv_slots=torch.tensor([1] * (total - 2) + [-1] * 2, device=device),
        query_start=torch.from_numpy(bounds).int().to(device),
        seq_lens=torch.from_numpy(starts + np.array(counts)).int().to(device),
        slots=torch.tensor(rng.sample(range(SLOTS - 1), len(counts)), device=device),
    ))  # fmt: skip
    states = torch.randn(total, WIDTH, device=device)
    plain, kernel = make_ring(rng, device), make_ring(rng, device)
    PlainPairs(context, cast(Any, NoPlan()), plain).keep(states, batch)
    KernelPairs(context, cast(Any, NoPlan()), kernel).keep(states, batch)
    own = (SLOTS - 1) * plain.reach  # the last slot is the dummy, which plain torch overwrites
    assert torch.equal(plain.states[:own], kernel.states[:own]) and kernel.states.any()


def test_logits_of_a_part_of_the_vocabulary_are_spread(device: str) -> None:
    from quire.kernels.draft_pairs import spread

    ids = torch.randperm(3000)[:700].sort().values.to(device)
    logits = torch.randn(3, 700, device=device)
    row_of = torch.full((3000,), -1, dtype=torch.int32, device=device)
    row_of[ids] = torch.arange(700, dtype=torch.int32, device=device)
    expected = logits.new_full((3, 3000), float("-inf")).index_copy_(1, ids, logits)
    assert torch.equal(spread(logits, row_of), expected)
