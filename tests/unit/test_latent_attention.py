"""Latent attention in plain PyTorch, absorbed and expanded, against float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from latents import check_latents, latent_case
from quire.attention import expanded_reference
from quire.attention.expanded_reference import ExpandedReference
from quire.attention.expanding import ExpandingAttention
from quire.attention.expansion_rule import NO_EXPANSION, ExpansionRule
from quire.attention.reference import ReferenceAttention
from ragged import Layer, Rows, check, make_case

DEEPSEEK = ExpansionRule(heads=16, rank=512, content_dim=128, value_dim=128)


class EveryPrompt(ExpansionRule):
    """Every row with several new tokens expands."""

    def rows(self, new: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return new > 1


def expanding() -> ExpandingAttention:
    return ExpandingAttention(ReferenceAttention(), ExpandedReference(), EveryPrompt(0, 0, 0, 0))


def drawn(seed: int) -> tuple[Rows, dict[str, Any]]:
    rng = random.Random(seed)
    rows = [
        (rng.choice([0, 1, 7, 33, 100]), rng.choice([1, 1, 1, 2, 9, 30])) for _ in range(rng.randrange(1, 7))
    ]
    return rows, {
        "heads": rng.choice([1, 3, 16]),
        "rank": rng.choice([8, 24, 64]),
        "rotary": rng.choice([4, 16]),
        "content": rng.choice([8, 20, 64]),
        "value": rng.choice([8, 24, 40]),
        "block_size": rng.choice([1, 4, 16, 128]),
        "interleaved": rng.random() < 0.5,
    }


@pytest.mark.parametrize("seed", range(30))
def test_reference_agrees_with_attention_written_out(seed: int) -> None:
    rows, options = drawn(seed)
    check_latents(latent_case(seed, ReferenceAttention(), rows, **options))


@pytest.mark.parametrize("seed", range(30))
def test_expanded_rows_agree_with_attention_written_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 3:  # many small pieces
        monkeypatch.setattr(expanded_reference, "_PIECE_NUMBERS", 1)
        monkeypatch.setattr(expanded_reference, "_SCORES", 1)
        monkeypatch.setattr(expanded_reference, "_LEAST_KEYS", random.Random(seed).choice([1, 5, 16]))
        monkeypatch.setattr(expanded_reference, "_LEAST_QUERIES", random.Random(seed).choice([1, 4, 7]))
    rows, options = drawn(100 + seed)
    check_latents(latent_case(seed, expanding(), rows, **options))


def test_long_rows_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.attention.reference._MASK_ELEMENTS", 200)
    check_latents(latent_case(1, ReferenceAttention(), [(30, 25), (0, 40)], heads=3))


@pytest.mark.parametrize("least_keys", [4, 64])
def test_an_entry_that_is_not_finite_reaches_only_those_who_see_it(
    least_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded_reference, "_PIECE_NUMBERS", 1)
    monkeypatch.setattr(expanded_reference, "_LEAST_KEYS", least_keys)
    rows = [(9, 4), (20, 1), (0, 5)]
    for make in (ReferenceAttention, expanding):
        clean = latent_case(2, make(), rows).run()
        case = latent_case(2, make(), rows)
        case.entries[7] = float("inf")
        got = case.run()
        assert got[7:].isnan().all() and torch.equal(got[:7], clean[:7])


def test_a_row_gives_the_same_bits_alone_and_in_company() -> None:
    """Whether and how a row expands depends on no other row."""
    rows = [(40, 1), (70, 30), (9, 2), (0, 50)]
    case = latent_case(3, expanding(), rows)
    together, entries, start = case.run(), case.old.clone(), 0
    for row, (old, new) in enumerate(rows):
        tokens, batch = slice(start, start + new), case.batch
        start += new
        alone = latent_case(3, expanding(), [(old, new)])
        alone.layer, alone.q, alone.entries = case.layer, case.q[tokens], case.entries[tokens]
        slots = batch.block_table[batch.slots[row]]
        its = alone.batch
        its.block_table, its.slots = slots.unsqueeze(0), torch.zeros(1, dtype=torch.int64)
        its.kv_slots, its.kv = batch.kv_slots[tokens], [(entries.view(batch.kv[0][0].shape).clone(),)]
        its.attn = expanding().plan(its)
        assert torch.equal(alone.run(), together[tokens])


def test_layers_of_a_drafter_may_keep_keys_and_values_of_heads() -> None:
    backend = expanding()
    case = make_case(random.Random(1), backend, Layer(4, 2, 16, 0.25), [(9, 4), (20, 1), (0, 5)], 4)
    assert isinstance(case.batch.attn, list)
    check(case, backend)


# -------------------------------------------------------------------------------------------- the rule


def multiply_adds(rule: ExpansionRule, new: int, past: int, expands: bool, rotary: int = 64) -> int:
    """Count those of one head, pair by pair."""
    width = rule.content_dim + rule.value_dim
    pairs = sum(past + i + 1 for i in range(new))
    if expands:
        return pairs * (width + rotary) + (past + new) * rule.rank * width
    return pairs * (2 * rule.rank + rotary) + new * rule.rank * width


@pytest.mark.parametrize("seed", range(20))
def test_rows_expand_where_that_takes_fewer_multiply_adds(seed: int) -> None:
    rng = random.Random(seed)
    rank, content, value = rng.choice([256, 512]), rng.choice([64, 128, 192]), rng.choice([64, 128, 256])
    rule = ExpansionRule(rng.choice([1, 16]), rank, content, value)
    new = np.array([rng.randrange(1, 600) for _ in range(9)])
    past = np.array([rng.choice([0, rng.randrange(100), rng.randrange(100_000)]) for _ in range(9)])
    saved = [
        multiply_adds(rule, n, p, False) - multiply_adds(rule, n, p, True)
        for n, p in zip(new.tolist(), past.tolist())
    ]
    assert (rule.saved(new, past + new) == rule.heads * np.array(saved)).all()
    assert (rule.rows(new, past + new) == (np.array(saved) > 0) & (new > 1)).all()


def test_prompts_expand_and_rows_that_decode_or_verify_drafts_do_not() -> None:
    def expands(new: int, past: int) -> bool:
        return bool(DEEPSEEK.rows(np.array([new]), np.array([past + new]))[0])

    assert expands(2, 0) and expands(171, 1 << 20) and not expands(170, 1 << 20)
    assert not any(expands(1, past) for past in (0, 1, 1000))
    assert not any(expands(new, 100) for new in range(9))
    assert not NO_EXPANSION.rows(np.array([1, 5000]), np.array([1, 5000])).any()


def test_a_row_must_save_as_much_as_the_lost_capture_costs() -> None:
    saved = DEEPSEEK.saved(np.array([1000]), np.array([3000]))[0]
    for least, expands in ((saved - 1, True), (saved, False)):
        rule = ExpansionRule(16, 512, 128, 128, least)
        assert rule.rows(np.array([1000]), np.array([3000])).tolist() == [expands]
