"""Sparse attention over latents: the reference and the Triton kernels against the choice and attention written out."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from latents import attend_written_out, latent_case, relative, tolerance
from quire.attention.base import AttentionBackend
from quire.attention.reference import ReferenceAttention

pytest.importorskip("triton", reason="Triton compiles the kernels")
from quire.attention.triton import TritonAttention
from quire.kernels.attention import sparse

ROWS = [(40, 1), (3, 1), (21, 9), (0, 30), (7, 2)]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled test covers this")


def compare(
    backend: AttentionBackend,
    seed: int,
    top_k: int = 6,
    heads: int = 3,
    dim: int = 24,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare the chosen positions and the attention over them with float64, row by row."""
    case = latent_case(seed, backend, ROWS, rank=40, device=device, dtype=dtype, block_size=8)
    batch, count = case.batch, sum(new for _, new in ROWS)
    old = torch.randn(len(case.old), dim, device=device).to(dtype)
    shape = backend.kv_shape(len(old) // 8, 8, 1, dim)
    batch.kv = [(batch.kv[0][0], old.view(shape).clone())]
    q = torch.randn(count, heads, dim, device=device).to(dtype)
    keys, weights = torch.randn(count, dim, device=device).to(dtype), torch.rand(count, heads, device=device)
    layer = SimpleNamespace(index=0, kv=None, dim=dim, top_k=top_k)
    chosen = backend.choose(layer, q, keys, weights, batch)
    assert chosen is not None and chosen.dtype == torch.int32 and chosen.shape == (count, top_k)
    got = case.layer(case.q, case.entries, case.rotation, batch, chosen)
    queries, entries = case.prepared()
    at = 0
    for row, (before, new) in enumerate(ROWS):
        seen = torch.arange(before, device=device)
        slots = batch.block_table[batch.slots[row]][seen // 8] * 8 + seen % 8
        all_keys = torch.cat([old[slots], keys[at : at + new]]).double()
        all_entries = torch.cat([case.old[slots], entries[at : at + new]]).double()
        for token in range(at, at + new):
            length = before + token - at + 1
            scores = weights[token].double() @ (q[token].double() @ all_keys[:length].T).relu()
            found = chosen[token][chosen[token] >= 0].long()
            assert len(set(found.tolist())) == len(found) == min(top_k, length)
            least = scores.topk(len(found)).values[-1]
            assert (scores[found] >= least - 1e-2 * scores.abs().max()).all()
            if dtype == torch.float32:
                assert set(found.tolist()) == set(scores.topk(len(found)).indices.tolist())
            seen = torch.ones(1, len(found), dtype=torch.bool, device=device)
            query = queries[token : token + 1].double()
            want = attend_written_out(case.layer, query, all_entries[found], seen)[0]
            assert relative(got[token], want) < tolerance(dtype)
        at += new


@pytest.mark.parametrize("seed", range(4))
def test_reference(seed: int) -> None:
    compare(ReferenceAttention(), seed, top_k=random.Random(seed).choice([1, 6, 35]))


@interpreted
@pytest.mark.parametrize(("seed", "top_k", "tile"), [(0, 6, 16), (1, 35, 32), (2, 1, 1024)])
def test_kernels_interpreted(seed: int, top_k: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_SELECT", tile)
    monkeypatch.setattr(sparse, "_MOST_SCORES", 400)
    compare(TritonAttention(), seed, top_k=top_k)


@interpreted
def test_of_equal_scores_the_first_are_chosen_interpreted() -> None:
    scores = torch.tensor([[0.0, 2.0, -1.0, 2.0, -0.0, 2.0, float("inf"), -3.0], [1.0] * 8])
    chosen = torch.full((2, 4), 9, dtype=torch.int32)
    positions = torch.tensor([7, 5])
    sparse._choose_kernel[(2,)](scores, chosen, positions, 8, TOP_K=4, TILE=4)
    assert chosen.tolist() == [[1, 3, 5, 6], [0, 1, 2, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    for seed in range(4):
        compare(
            TritonAttention(), seed, top_k=6 + 20 * (seed % 2), heads=64, dim=128, device="cuda", dtype=dtype
        )
