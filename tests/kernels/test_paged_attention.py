"""The Triton back end against attention written out in float64: on random ragged batches in Triton's
interpreter without a GPU, and on many and larger ones compiled."""

from __future__ import annotations

import random

import pytest
import torch

from ragged import Layer, Rows, check, make_case

pytest.importorskip("triton")

from quire.attention.triton import TritonAttention
from quire.kernels import paged_attention

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled tests cover this")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compare(
    rows: Rows,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    slack: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> None:
    torch.manual_seed(seed)
    layer = Layer(heads, kv_heads, dim, dim**-0.5, window, soft_cap)
    backend = TritonAttention()
    check(
        make_case(random.Random(seed), backend, layer, rows, block_size, device, dtype, slack),
        backend,
    )


def random_rows(rng: random.Random, longest: int, news: list[int], most: int) -> Rows:
    return [
        (rng.randrange(longest) if rng.random() < 0.7 else 0, rng.choice(news))
        for _ in range(rng.randrange(1, most))
    ]


# ------------------------------------------------------------------------------- in the interpreter


@interpreted
@pytest.mark.parametrize("seed", range(16))
def test_random_batches_interpreted(seed: int) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2])
    compare(
        random_rows(rng, 150, [1, 1, 1, 2, 9, 40], 5),
        heads=kv_heads * rng.choice([1, 2, 3, 8]),
        kv_heads=kv_heads,
        dim=rng.choice([16, 64, 80]),
        block_size=rng.choice([1, 5, 16, 64, 300]),
        window=rng.choice([None, None, 1, 5, 24, 100]),
        soft_cap=rng.choice([None, None, 3.0]),
        slack=rng.choice([0, 0, 3]),
        seed=seed,
    )


@interpreted
@pytest.mark.parametrize("block_size", [1, 5, 16, 200])
def test_one_token_rows_interpreted(block_size: int) -> None:
    compare([(0, 1), (31, 1), (150, 1), (64, 1)], block_size=block_size, dim=128)


@interpreted
@pytest.mark.parametrize("window", [None, 40])
def test_several_tiles_of_new_tokens_interpreted(window: int | None) -> None:
    compare([(0, 1), (20, 70), (3, 2), (0, 50)], heads=4, kv_heads=1, dim=32, window=window)


@interpreted
def test_a_search_over_more_rows_than_one_load_interpreted() -> None:
    rows = [(0, 1)] * 300
    rows[280] = rows[299] = (2, 20)
    compare(rows, heads=1, kv_heads=1)


@interpreted
def test_a_negative_slot_is_not_written() -> None:
    keys, values = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4, 16)
    k, v = torch.ones(2, 1, 16), torch.ones(2, 1, 16)
    paged_attention.write_kv(k, v, keys, values, torch.tensor([-1, 5]))
    assert keys.sum() == values.sum() == 16
    assert keys[1, 0, 1].sum() == 16


def test_splits_fill_the_device_and_do_not_exceed_the_keys() -> None:
    assert paged_attention.num_splits(256, 8, 4096, 128, 2) == 1
    assert paged_attention.num_splits(1, 8, 4096, 128, 2) > 8
    assert paged_attention.num_splits(1, 8, 1, 128, 2) == 1


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 8])
    compare(
        random_rows(rng, 900, [1, 1, 1, 2, 5, 9, 40, 300], 12),
        heads=kv_heads * rng.choice([1, 2, 3, 4, 7, 8, 16]),
        kv_heads=kv_heads,
        dim=rng.choice([16, 64, 80, 96, 128, 256]),
        block_size=rng.choice([1, 5, 16, 32, 64, 1300]),
        window=rng.choice([None, None, 1, 24, 300]),
        soft_cap=rng.choice([None, None, 3.0]),
        slack=rng.choice([0, 0, 3]),
        device="cuda",
        dtype=dtype,
        seed=seed,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "rows",
    [[(12000, 1)], [(9000, 5)], [(700, 1)] * 100, [(0, 5000)], [(5000, 1500), (3000, 1), (0, 1), (4000, 2)]],
    ids=["one", "verify", "many", "prompt", "mixed"],
)
def test_long_contexts(rows: Rows, dim: int, dtype: torch.dtype) -> None:
    compare(rows, heads=8, kv_heads=2, dim=dim, device="cuda", dtype=dtype)


@pytest.mark.gpu
def test_decode_in_a_graph_follows_the_lengths() -> None:
    backend, layer = TritonAttention(), Layer(8, 2, 128, 128**-0.5)
    case = make_case(random.Random(0), backend, layer, [(600, 1)] * 4, 16, "cuda", torch.bfloat16)
    batch, lens = case.batch, case.batch.seq_lens.clone()

    def run() -> torch.Tensor:
        return backend.forward(layer, case.q, case.k, case.v, batch)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for shorter in (0, 100, 599, 600):
        batch.seq_lens.copy_(lens - shorter)
        graph.replay()
        assert torch.equal(out, run())
    batch.seq_lens.zero_()  # rows that only pad a graph
    graph.replay()
    assert not out.any()
