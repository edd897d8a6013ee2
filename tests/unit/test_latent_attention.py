"""Latent attention of the reference back end against float64, and absorbed against expanded heads."""

from __future__ import annotations

import random

import pytest
import torch

from latents import check_latents, latent_case
from quire.attention.reference import ReferenceAttention


@pytest.mark.parametrize("seed", range(30))
def test_reference_agrees_with_attention_written_out(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        (rng.choice([0, 1, 7, 33, 100]), rng.choice([1, 1, 1, 2, 9, 30])) for _ in range(rng.randrange(1, 7))
    ]
    check_latents(
        latent_case(
            seed,
            ReferenceAttention(),
            rows,
            heads=rng.choice([1, 3, 16]),
            rank=rng.choice([8, 24, 64]),
            rotary=rng.choice([4, 16]),
            block_size=rng.choice([1, 4, 16, 128]),
            interleaved=rng.random() < 0.5,
        )
    )


def test_long_rows_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.attention.reference._MASK_ELEMENTS", 200)
    check_latents(latent_case(1, ReferenceAttention(), [(30, 25), (0, 40)], heads=3))


def test_an_entry_that_is_not_finite_reaches_only_those_who_see_it() -> None:
    rows = [(9, 4), (20, 1), (0, 5)]
    clean = latent_case(2, ReferenceAttention(), rows).run()
    case = latent_case(2, ReferenceAttention(), rows)
    case.entries[7] = float("inf")
    got = case.run()
    assert got[7:].isnan().all() and torch.equal(got[:7], clean[:7])
