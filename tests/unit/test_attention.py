"""The reference back end against attention written out row by row in float64, on random ragged batches."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from quire.attention.base import ForwardBatch
from quire.attention.reference import ReferenceAttention


@dataclass
class Layer:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    index: int = 0


def ragged_batch(
    rng: random.Random, rows: list[tuple[int, int]], block_size: int, layer: Layer, device: str, slack: int
):
    """A batch of (entries already there, new tokens) per row on shuffled pages, with random old KV.

    `slack` makes the host's bounds larger than the device's lengths, as drafts in flight do.
    """
    lens = [old + new for old, new in rows]
    need = [-(-(n + slack) // block_size) for n in lens]
    pages = list(range(sum(need) + 3))
    rng.shuffle(pages)
    table = torch.zeros(len(rows), max(need), dtype=torch.int32)
    for row, count in enumerate(need):
        table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
    backend = ReferenceAttention()
    shape = backend.kv_shape(sum(need) + 3, block_size, layer.num_kv_heads, layer.head_dim)
    kv = (torch.randn(shape), torch.randn(shape))
    positions = torch.cat([torch.arange(old, old + new) for old, new in rows])
    row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([new for _, new in rows]))
    kv_slots = table[row_of, positions // block_size].long() * block_size + positions % block_size
    counts = np.array([new for _, new in rows], np.int32)
    batch = ForwardBatch(
        input_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        kv_slots=kv_slots.to(device),
        query_start=torch.tensor([0, *counts.cumsum()], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        logit_index=torch.empty(0, dtype=torch.int64, device=device),
        kv=[(kv[0].to(device), kv[1].to(device))],
        num_tokens=counts,
        seq_bounds=np.array(lens, np.int32) + slack,
        block_size=block_size,
    )
    batch.attn = backend.plan(batch)
    return backend, batch, kv, table


def naive(layer: Layer, q, k, v, rows, kv, table, block_size) -> torch.Tensor:
    out, at = [], 0
    for row, (old, new) in enumerate(rows):
        flat = [int(table[row, p // block_size]) * block_size + p % block_size for p in range(old)]
        keys = torch.cat(
            [kv[0].view(-1, layer.num_kv_heads, layer.head_dim)[flat], k[at : at + new]]
        ).double()
        values = torch.cat(
            [kv[1].view(-1, layer.num_kv_heads, layer.head_dim)[flat], v[at : at + new]]
        ).double()
        for i in range(new):
            end = old + i + 1
            begin = max(0, end - layer.window) if layer.window else 0
            for head in range(layer.num_heads):
                kv_head = head * layer.num_kv_heads // layer.num_heads
                scores = keys[begin:end, kv_head] @ q[at + i, head].double() * layer.scale
                if layer.soft_cap:
                    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
                out.append(scores.softmax(0) @ values[begin:end, kv_head])
        at += new
    return torch.stack(out).view(at, -1)


def compare(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads = rng.choice([1, 2, 3])
    layer = Layer(
        num_heads=kv_heads * rng.choice([1, 2, 4]),
        num_kv_heads=kv_heads,
        head_dim=rng.choice([8, 16, 64]),
        scale=rng.choice([0.2, 0.125]),
        window=rng.choice([None, None, 1, 5, 24]),
        soft_cap=rng.choice([None, None, 3.0]),
    )
    block_size = rng.choice([1, 4, 16, 128])
    rows = [
        (rng.choice([0, 1, 7, 33, 100]) if rng.random() < 0.7 else 0, rng.choice([1, 1, 1, 2, 9, 30]))
        for _ in range(rng.randrange(1, 7))
    ]
    slack = rng.choice([0, 0, 3]) if device != "cpu" or rng.random() < 0.5 else 0
    backend, batch, kv, table = ragged_batch(rng, rows, block_size, layer, device, slack)
    total = int(batch.num_tokens.sum())
    q = torch.randn(total, layer.num_heads, layer.head_dim)
    k, v = (torch.randn(total, layer.num_kv_heads, layer.head_dim) for _ in range(2))
    want = naive(layer, q, k, v, rows, kv, table, block_size)
    got = backend.forward(layer, q.to(device), k.to(device), v.to(device), batch).cpu()
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_reference_agrees_with_attention_written_out(seed: int) -> None:
    compare(seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_reference_on_the_gpu(seed: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    compare(seed, "cuda")
