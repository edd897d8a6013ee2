"""The Triton kernels of latent attention against float64, on random ragged batches.

Without a GPU they run in Triton's interpreter. On a GPU the batches are larger, and have DeepSeek's sizes too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from targets import TARGETS

from latents import LatentCase, check_latents, latent_case
from ragged import Rows

pytest.importorskip("triton")

from quire.attention.expanded_triton import ExpandedSizes, ExpandedTriton, _packed
from quire.attention.expanding import ExpandingAttention
from quire.attention.expansion_rule import ExpansionRule
from quire.attention.triton import TritonAttention
from quire.kernels.attention import latent
from quire.kernels.attention.latent import latent_splits, latent_tokens

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled tests cover this")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(seed: int, rows: Rows, **options: Any) -> LatentCase:
    return latent_case(seed, TritonAttention(), rows, **options)


def random_rows(rng: random.Random, longest: int, news: list[int], most: int) -> Rows:
    return [
        (rng.randrange(longest) if rng.random() < 0.7 else 0, rng.choice(news))
        for _ in range(rng.randrange(1, most))
    ]


def drawn(rng: random.Random) -> dict[str, Any]:
    return {
        "heads": rng.choice([1, 3, 16, 20, 80]),
        "rank": rng.choice([16, 24, 64]),
        "rotary": rng.choice([8, 16, 20]),
        "block_size": rng.choice([1, 5, 16, 64, 300]),
        "interleaved": rng.random() < 0.7,
    }


@interpreted
@pytest.mark.parametrize("seed", range(10))
def test_random_batches_interpreted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(latent, "swaps", lambda _: seed % 2 > 0)
    rows = random_rows(rng, 150, [1] if seed % 3 == 0 else [1, 1, 2, 9, 40], 5)
    check_latents(make(seed, rows, slack=rng.choice([0, 3]), **drawn(rng)))


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_batches_padded_to_bounds_interpreted(seed: int) -> None:
    rng = random.Random(100 + seed)
    rows = random_rows(rng, 150, rng.choice([[1], [1, 1, 2, 9, 40], [20, 30]]), 4)
    unused = rng.choice([(0, 0), (1, 3), (30, 0), (40, 10)])
    check_latents(make(seed, rows, unused=unused, **{**drawn(rng), "heads": rng.choice([3, 20])}))


@interpreted
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_not_split_interpreted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.attention.triton.latent_splits", lambda *_: 1)
    rng = random.Random(200 + seed)
    check_latents(make(seed, random_rows(rng, 150, [1, 1, 9], 5), **drawn(rng)))


class LongerThanTwo(ExpansionRule):
    """Rows with more than two new tokens expand."""

    def rows(self, new: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return new > 2


def expanding(seed: int, rows: Rows, most_keys: int, **options: Any) -> LatentCase:
    """Return a case whose long rows expand, at most `most_keys` keys at a time."""
    options = {"heads": 4, "content": 24, "rotary": 16, "value": 20, "dtype": torch.float32, **options}
    widths = [options[name] for name in ("heads", "content", "rotary", "value")]
    sizes = ExpandedSizes(*widths, options["dtype"].itemsize)
    expanded = ExpandedTriton(sizes, most_keys * sizes.key_bytes)
    backend = ExpandingAttention(TritonAttention(), expanded, LongerThanTwo(0, 0, 0, 0))
    return latent_case(seed, backend, rows, **options)


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_expand_interpreted(seed: int) -> None:
    rng = random.Random(400 + seed)
    options = {**drawn(rng), "content": rng.choice([16, 20, 40]), "value": rng.choice([8, 16, 24])}
    options |= {"heads": rng.choice([1, 2]), "slack": rng.choice([0, 3])}
    options["dtype"] = torch.float16 if seed % 3 == 2 else torch.float32  # the interpreter pads no bfloat16
    rows = random_rows(rng, 60, [1, 2, 9, 33], 3)
    check_latents(expanding(seed, [*rows, (rng.choice([0, 50]), 21)], rng.choice([1000, 30, 64]), **options))


def test_pieces_cover_all_keys_once_and_rows_are_cut_at_fixed_places() -> None:
    rng = random.Random(1)
    for _ in range(50):
        lengths = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 9))]
        most = rng.randrange(1, 50)
        pieces = list(_packed(lengths, most))
        assert all(0 < sum(count for _, _, count in piece) <= most for piece in pieces)
        assert [
            (row, first + i) for piece in pieces for row, first, count in piece for i in range(count)
        ] == [(row, key) for row, length in enumerate(lengths) for key in range(length)]
        assert all(first % most == 0 for piece in pieces for _, first, _ in piece)


def check_spoilt(seed: int, rows: Rows, make: Callable[..., LatentCase] = make, **options: Any) -> None:
    """Tokens that see a non-finite entry become NaN, and no other result changes."""
    clean, case = make(seed, rows, **options).run(), make(seed, rows, **options)
    row = random.Random(seed).randrange(len(rows))
    first = sum(new for _, new in rows[:row])
    token = first + rows[row][1] // 2
    case.entries[token, -1 if seed % 2 else 3] = float("inf") if seed % 3 else float("nan")
    got = case.run()
    assert case.batch.kv[0][0][..., : case.layer.rank].isfinite().all()
    for other in range(len(clean)):
        if token <= other < first + rows[row][1]:
            assert got[other].isnan().all(), f"token {other} does not see it"
        else:
            assert torch.equal(got[other], clean[other]), f"token {other} changed"


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_finite_reaches_only_those_who_see_it(seed: int) -> None:
    rng = random.Random(300 + seed)
    check_spoilt(seed, random_rows(rng, 60, [1, 2, 9], 4), heads=3, block_size=rng.choice([1, 5, 16]))


@interpreted
@pytest.mark.parametrize("seed", range(2))
def test_of_rows_that_expand_what_is_not_finite_reaches_only_those_who_see_it(seed: int) -> None:
    rng = random.Random(500 + seed)
    rows = [(20, 1), (rng.randrange(30), 9), (0, 12)]
    check_spoilt(seed, rows, expanding, most_keys=(16, 100)[seed], heads=2)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("heads", [16, 128])
def test_the_largest_models_fit_on_gpus_with_matrix_units(capability: int, heads: int) -> None:
    target = TARGETS[capability]
    assert TritonAttention.fits_latent(heads, 576, 2, target) == target.has_matrix_units


def test_splits_fill_the_device_and_do_not_exceed_the_entries() -> None:
    hopper = TARGETS[90]
    assert latent_splits(1, 16, 1, 576, 2, hopper) == 1
    assert latent_splits(1, 16, 1 << 17, 576, 2, hopper) > 16
    assert latent_splits(512, 16, 4096, 576, 2, hopper) == 1
    assert latent_tokens(128, 576, 2, hopper) == 1
    assert latent_tokens(16, 576, 2, hopper) > 1


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("seed", range(4))
def test_deepseek_sizes(seed: int, heads: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 1500, [1] if seed % 2 else [1, 1, 2, 9, 300], rng.choice([6, 40]))
    block_size = rng.choice([16, 64])
    check_latents(
        make(seed, rows, heads=heads, rank=512, rotary=64, block_size=block_size, device="cuda", dtype=dtype)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 900, [1, 1, 2, 9, 300], 20)
    check_latents(make(seed, rows, slack=rng.choice([0, 3]), device="cuda", dtype=dtype, **drawn(rng)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most_keys", [700, 1 << 14])
def test_rows_that_expand(most_keys: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        rows = random_rows(rng, 1500, [1, 2, 9, 300, 700], 6)
        options = {"heads": 16, "rank": 512, "rotary": 64, "content": 128, "value": 128, "device": "cuda"}
        check_latents(expanding(seed, rows, most_keys, slack=seed, dtype=dtype, **options))


@pytest.mark.gpu
def test_one_graph_serves_any_mix_of_rows() -> None:
    """A graph captured for 600 tokens and 40 rows serves smaller steps."""
    mixes: list[Rows] = [[(0, 300), (200, 1), (50, 7), (3, 40)], [(590, 1)] * 40, [(100, 600)]]
    cases = []
    for rows in mixes:
        unused = (600 - sum(new for _, new in rows), 40 - len(rows))
        cases.append(
            make(1, rows, heads=16, rank=512, rotary=64, unused=unused, slack=700, device="cuda",
                 dtype=torch.bfloat16)
        )  # fmt: skip
    for case in cases:
        case.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.batch.attn = TritonAttention().plan(case.batch)
            got = case.run()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, case.run())
        check_latents(case)
