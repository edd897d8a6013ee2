"""The Triton attention backend against plain attention in float64, on random ragged batches.

Without a GPU it runs in Triton's interpreter. On a GPU there are more and larger batches.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from targets import TARGETS

from quire.layers.norm import HeadNorm, make_rms
from quire.layers.rope import Rope, RotaryHeads
from quire.layers.rope_params import RopeParams
from ragged import Case, Layer, Rows, check, check_packed, make_case
from ragged import compare as compare_with_oracle

pytest.importorskip("triton")

from quire.attention.triton import TritonAttention
from quire.kernels.attention import long as attend_long
from quire.kernels.attention import short as attend_short
from quire.kernels.attention.kv_write import write_kv

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled tests cover this")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case_of(
    rows: Rows,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    slack: int = 0,
    unused: tuple[int, int] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sinks: bool = False,
    span: int = 0,
    chunked: bool = False,
) -> tuple[Case, TritonAttention]:
    torch.manual_seed(seed)
    layer = Layer(heads, kv_heads, dim, dim**-0.5, window, soft_cap, span=span, chunked=chunked)
    if sinks:
        layer.sinks = 2 * torch.randn(heads, device=device)
    backend = TritonAttention()
    made = make_case(random.Random(seed), backend, layer, rows, block_size, device, dtype, slack, unused)
    return made, backend


def compare(rows: Rows, **options: Any) -> None:
    check(*case_of(rows, **options))


def compare_packed(rows: Rows, normed: bool, **options: Any) -> None:
    case, backend = case_of(rows, **options)
    check_packed(case, backend, normed)


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a device that few rows fill, so that one program handles an entire row of a KV head."""
    monkeypatch.setattr("quire.attention.triton.num_splits", lambda *_: 1)


def drawn(rng: random.Random, largest: int, block_sizes: list[int]) -> dict[str, Any]:
    """Draw the sizes of a layer, with heads of at most `largest` dimensions."""
    kv_heads = rng.choice([1, 2, 8] if largest > 80 else [1, 2])
    dim = rng.choice([dim for dim in (16, 64, 80, 96, 128, 256) if dim <= largest])
    return {
        "heads": kv_heads * rng.choice([1, 2, 3, 4, 7, 8, 16] if largest > 80 else [1, 2, 3, 8]),
        "kv_heads": kv_heads,
        "dim": dim,
        "span": rng.choice([0, 0, 1, dim // 4, 3 * dim // 8]),
        "sinks": rng.choice([False, False, True]),
        "block_size": rng.choice(block_sizes),
        "window": rng.choice([None, None, 1, 5, 24, 100]),
        "soft_cap": rng.choice([None, None, 3.0]),
    }


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
        sinks=rng.choice([False, True]),
        slack=rng.choice([0, 0, 3]),
        chunked=seed % 2 > 0,
        seed=seed,
    )


@interpreted
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_not_split_interpreted(seed: int, as_if_large: None) -> None:
    rng = random.Random(200 + seed)
    rows = random_rows(rng, 150, [1] if seed % 2 else [1, 1, 2, 9, 40], 5)
    compare(rows, seed=seed, **drawn(rng, 80, [1, 5, 16, 64, 300]))


@interpreted
@pytest.mark.parametrize("seed", range(12))
def test_packed_heads_interpreted(seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 150, [1] if seed % 3 else [1, 1, 2, 9, 40], 5)
    compare_packed(rows, seed % 2 > 0, seed=seed, **drawn(rng, 80, [1, 5, 16, 64, 300]))


@interpreted
@pytest.mark.parametrize("seed", range(8))
def test_batches_padded_to_bounds_interpreted(seed: int) -> None:
    rng = random.Random(100 + seed)
    rows = random_rows(rng, 150, rng.choice([[1], [1, 1, 2, 9, 40], [40, 70]]), 5)
    unused = rng.choice([(0, 0), (1, 3), (60, 0), (100, 20)])
    sizes = drawn(rng, 80, [1, 5, 16, 64])
    compare(rows, unused=unused, seed=seed, **sizes)
    compare_packed(rows, seed % 2 > 0, unused=unused, seed=seed, **sizes)


def spoil(case: Case, rng: random.Random, packed: bool) -> set[int]:
    """Make one token's key or value non-finite, and return the tokens that see it."""
    row = rng.randrange(len(case.rows))
    first = sum(new for _, new in case.rows[:row])
    new = case.rows[row][1]
    token = first + rng.randrange(new)
    part = rng.choice([case.k, case.v])
    part[token, -1, rng.randrange(part.shape[2])] = rng.choice([float("nan"), float("inf"), float("-inf")])
    window = case.layer.window or 1 << 30
    return {t for t in range(token, first + new) if t - token < window}


def check_spoilt(rows: Rows, seed: int, packed: bool, **options: Any) -> None:
    """Tokens that see a non-finite key or value become NaN in its heads; no other result changes by a bit."""
    rng = random.Random(seed)

    def results(case: Case, backend: TritonAttention) -> torch.Tensor:
        if not packed:
            return backend.forward(case.layer, case.q, case.k, case.v, case.batch)
        positions, dim = int(case.batch.positions.max()) + 1, case.layer.head_dim
        rope = Rope(RopeParams(theta=10000.0), dim, positions, case.q.device, case.q.dtype)
        wide = torch.cat((case.qkv, case.qkv[:, :1]), 1).flatten(1)  # as with a gate behind, in Qwen3-Next
        qkv = wide[:, : -case.qkv.shape[2]]
        return backend.forward_packed(case.layer, qkv, None, rope.table, case.batch)

    clean = results(*case_of(rows, seed=seed, **options))
    case, backend = case_of(rows, seed=seed, **options)
    seeing = spoil(case, rng, packed)
    got = results(case, backend)
    for token in range(sum(new for _, new in rows)):
        if token in seeing:
            assert not got[token].isfinite().all(), f"token {token} does not see it"
        else:
            assert torch.equal(got[token], clean[token]), f"token {token} changed"


@interpreted
@pytest.mark.parametrize("seed", range(12))
def test_what_is_not_finite_reaches_only_those_who_see_it(seed: int) -> None:
    rng = random.Random(300 + seed)
    rows = random_rows(rng, 60, [1, 1, 2, 9, 40], 4)
    check_spoilt(rows, seed, packed=seed % 2 > 0, **drawn(rng, 80, [1, 5, 16, 64]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_finite_reaches_only_those_who_see_it_on_the_gpu(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(400 + seed)
    rows = random_rows(rng, 600, [1, 1, 2, 9, 40, 300], 9)
    sizes = drawn(rng, 128, [1, 16, 64])
    check_spoilt(rows, seed, packed=seed % 2 > 0, device="cuda", dtype=dtype, **sizes)


def test_bounds_have_room_for_every_mix() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        queries, per_tile = rng.choice([1, 2, 8, 16]), rng.choice([1, 8, 16, 64, 128])
        counts = [
            rng.choice([0, 1, queries, queries + 1, per_tile + 1, 200]) for _ in range(rng.randrange(1, 9))
        ]
        tiles = sum(-(-n // per_tile) for n in counts if n > queries)
        assert tiles <= attend_long.most_tiles(sum(counts), len(counts), queries, per_tile)


@interpreted
@pytest.mark.parametrize("block_size", [1, 5, 16, 200])
def test_one_token_rows_interpreted(block_size: int) -> None:
    compare([(0, 1), (31, 1), (150, 1), (64, 1)], block_size=block_size, dim=128)


@interpreted
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (40, False), (40, True)])
def test_several_tiles_of_new_tokens_interpreted(window: int | None, chunked: bool) -> None:
    rows = [(0, 1), (20, 70), (3, 2), (0, 50)]
    compare(rows, heads=4, kv_heads=1, dim=32, window=window, chunked=chunked)


@interpreted
def test_a_search_over_more_rows_than_one_load_interpreted() -> None:
    rows = [(0, 1)] * 300
    rows[280] = rows[299] = (2, 20)
    compare(rows, heads=1, kv_heads=1)


@interpreted
def test_a_negative_slot_is_not_written() -> None:
    keys, values = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4, 16)
    k, v = torch.ones(2, 1, 16), torch.ones(2, 1, 16)
    write_kv(k, v, keys, values, torch.tensor([-1, 5]))
    assert keys.sum() == values.sum() == 16
    assert keys[1, 0, 1].sum() == 16


def test_splits_fill_the_device_and_do_not_exceed_the_keys() -> None:
    splits = partial(attend_short.num_splits, dim=128, itemsize=2)
    hopper, small = TARGETS[90], TARGETS[75]
    assert splits(256, 8, 4096, target=hopper) == 1
    assert splits(1, 8, 4096, target=hopper) == 32
    assert splits(1, 8, 1, target=hopper) == 1
    assert splits(1, 1, 1 << 20, target=hopper) == 256  # two programs for each of 132 multiprocessors
    assert splits(1, 8, 4096, target=small) == 8


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_splits_that_are_merged_in_parts_interpreted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_short, "_MERGED_SUMS", 32)
    rng = random.Random(300 + seed)
    rows = random_rows(rng, 150, [1] if seed % 2 else [1, 1, 2, 9], 4)
    options: dict[str, Any] = {"dim": 128, "block_size": 16, "window": rng.choice([None, 40, 100])}
    compare(rows, seed=seed, heads=4, kv_heads=1, unused=rng.choice([None, (3, 2)]), **options)


# ------------------------------------------------------------------------------------- on a GPU


PAGES = [1, 5, 16, 32, 64, 1300]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 900, [1, 1, 1, 2, 5, 9, 40, 300], rng.choice([12, 60]))
    slack, sizes = rng.choice([0, 0, 3]), drawn(rng, 256, PAGES)
    compare(rows, slack=slack, device="cuda", dtype=dtype, seed=seed, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_packed_heads(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 900, [1] if seed % 3 else [1, 1, 2, 9, 300], rng.choice([12, 60]))
    sizes = drawn(rng, 256, PAGES)
    compare_packed(rows, seed % 2 > 0, seed=seed, device="cuda", dtype=dtype, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_one_graph_serves_any_mix_of_rows(kv_heads: int, normed: bool) -> None:
    """A graph captured for 600 tokens and 40 rows serves smaller steps."""
    mixes: list[Rows] = [
        [(0, 300), (200, 1), (50, 7), (3, 40)],
        [(590, 1)] * 40,
        [(100, 600)],
        [(10 * row, 15) for row in range(40)],
        [(5, 9)] + [(100, 1)] * 30 + [(0, 128), (64, 64)],
    ]
    backend = TritonAttention()
    layer = Layer(2 * kv_heads, kv_heads, 128, 128**-0.5)
    cases = []
    for rows in mixes:
        unused = (600 - sum(new for _, new in rows), 40 - len(rows))
        cases.append(
            make_case(random.Random(1), backend, layer, rows, 16, "cuda", torch.bfloat16, unused=unused)
        )
    blocks = max(case.old_k.shape[0] for case in cases) // 16
    fixed = make_case(
        random.Random(1), backend, layer, mixes[0], 16, "cuda", torch.bfloat16, unused=(252, 36)
    )
    shape = (blocks, kv_heads, 16, 128)
    fixed.batch.kv = [tuple(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv")]
    fixed.batch.block_table = torch.zeros(42, 64, dtype=torch.int32, device="cuda")
    fixed.batch.attn = backend.plan(fixed.batch)
    norms = None
    if normed:
        norms = object.__new__(HeadNorm)  # without a checkpoint
        norms.weight, norms.eps = torch.rand(3 * kv_heads, 128, device="cuda").bfloat16() + 0.5, 1e-6
        norms.rms = make_rms(norms.weight, 128, 1e-6)
    rope = Rope(RopeParams(theta=10000.0), 128, 1024, torch.device("cuda"), torch.bfloat16)
    plain = RotaryHeads(2 * kv_heads, kv_heads, 128, norms)
    qkv = torch.zeros(600, 4 * kv_heads * 128, dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        return backend.forward_packed(layer, qkv.clone(), norms, rope.table, fixed.batch)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for case in cases:
        batch, static = case.batch, fixed.batch
        for name in ("positions", "kv_slots", "query_start", "seq_lens", "slots"):
            getattr(static, name).copy_(getattr(batch, name))
        static.block_table.zero_()[:, : batch.block_table.shape[1]] = batch.block_table
        for mine, theirs in zip(static.kv[0], batch.kv[0]):
            mine.fill_(float("nan"))[: theirs.shape[0]] = theirs
        qkv.copy_(case.qkv.flatten(1))
        graph.replay()
        q, k, v = plain(case.qkv.flatten(1).clone(), rope.lookup(batch.positions))
        compare_with_oracle(out, replace(case, q=q, k=k, v=v))


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


# --------------------------------------------------------------------- rows that begin with the same blocks


def shared_case(
    rng: random.Random, rows: int, prefix: int, apart: int, device: str, dtype: torch.dtype, **sizes: Any
) -> tuple[Case, TritonAttention]:
    """Make `rows` rows that share blocks of `prefix` tokens, mixed with `apart` other rows."""
    block = sizes["block_size"]
    lens = [(prefix + rng.randrange(90), 1) for _ in range(rows)] + [
        (rng.randrange(200), 1) for _ in range(apart)
    ]
    case, backend = case_of(lens, device=device, dtype=dtype, seed=rng.randrange(999), **sizes)
    batch, blocks = case.batch, prefix // block
    batch.block_table[batch.slots[:rows], :blocks] = batch.block_table[batch.slots[0], :blocks].clone()
    tokens = [prefix] * rows + [0] * apart
    order = torch.randperm(rows + apart)
    batch.slots = batch.slots[order.to(device)]
    batch.seq_lens, batch.kv_slots = batch.seq_lens[order.to(device)], batch.kv_slots[order.to(device)]
    batch.positions = batch.positions[order.to(device)]
    case.rows[:] = [case.rows[i] for i in order.tolist()]
    header = torch.zeros(
        rows + apart, 4, dtype=torch.int32, device=device
    )  # as a column of it, with a stride
    header[:, 3] = torch.tensor(tokens, device=device)[order.to(device)]
    batch.shared = header[:, 3]
    batch.attn = backend.plan(batch)
    return case, backend


@interpreted
@pytest.mark.parametrize("seed", range(8))
def test_shared_blocks_interpreted(seed: int, as_if_large: None) -> None:
    rng = random.Random(seed)
    sizes = {**drawn(rng, 80, [4, 16, 64]), "window": None}
    prefix = sizes["block_size"] * rng.randint(1, 5)
    check(*shared_case(rng, rng.randint(2, 9), prefix, rng.randint(0, 3), "cpu", torch.float32, **sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_shared_blocks(seed: int, dtype: torch.dtype, as_if_large: None) -> None:
    rng = random.Random(seed)
    sizes = {**drawn(rng, 256, [16, 32, 64]), "window": None}
    prefix = sizes["block_size"] * rng.randint(1, 40)
    check(*shared_case(rng, rng.randint(20, 90), prefix, rng.randint(0, 30), "cuda", dtype, **sizes))
