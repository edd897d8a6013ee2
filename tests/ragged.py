"""Random ragged batches on shuffled blocks, and the oracle of all attention back ends: row by row, in float64.

Batches can be padded to bounds, as in captured graphs, and can have packed q|k|v before norms and rotation."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.attention.entries import round_heads
from quire.layers.norm import HeadNorm, make_rms
from quire.layers.rope import Rope, RotaryHeads
from quire.layers.rope_params import RopeParams
from quire.types import KVCodes, KVLayout

Rows = list[tuple[int, int]]  # (entries already there, new tokens) per row


@dataclass
class Layer:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    index: int = 0
    sinks: torch.Tensor | None = None
    span: int = 0
    codes: KVCodes | None = None
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None
    chunked: bool = False

    @property
    def kv(self) -> KVLayout:
        return KVLayout.keys_and_values(self.num_kv_heads, self.head_dim, "float32", self.window, self.codes)


@dataclass
class Case:
    """One layer's inputs for a batch; old_k and old_v [slots, kv heads, dim] lack the new keys and values."""

    layer: Layer
    rows: Rows
    batch: ForwardBatch
    old_k: torch.Tensor
    old_v: torch.Tensor
    qkv: torch.Tensor  # [tokens, heads + 2 kv heads, dim], of which q, k and v are views
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_case(
    rng: random.Random,
    backend: AttentionBackend,
    layer: Layer,
    rows: Rows,
    block_size: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    slack: int = 0,
    unused: tuple[int, int] | None = None,
) -> Case:
    """`slack` makes the host's bounds larger than the device's lengths, as drafts in flight do. `unused` are
    tokens and rows beyond those in use, in a batch of which the host knows the bounds only."""
    lens = [old + new for old, new in rows]
    need = [-(-(n + slack) // block_size) for n in lens]
    blocks = list(range(sum(need) + 3))
    rng.shuffle(blocks)
    table = torch.zeros(len(rows), max(need), dtype=torch.int32)
    for row, count in enumerate(need):
        table[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    positions = torch.cat([torch.arange(old, old + new) for old, new in rows])
    row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([new for _, new in rows]))
    kv_slots = table[row_of, positions // block_size].long() * block_size + positions % block_size
    counts = np.array([new for _, new in rows], np.int32)
    starts = [0, *counts.cumsum().tolist()]
    spare_tokens, spare_rows = unused or (0, 0)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    heads, dim, num_blocks = layer.num_kv_heads, layer.head_dim, sum(need) + 3
    old_k, old_v = (random_tensor(num_blocks, block_size, heads, dim) for _ in range(2))
    head_first = backend.kv_shape(2, 3, 5, 7) == (2, 5, 3, 7)
    # q, k and v are slices of one tensor, as a fused projection leaves them.
    qkv = random_tensor(len(positions) + spare_tokens, layer.num_heads + 2 * heads, dim)
    qkv[len(positions) :] = float("nan")  # NaN, so that reading them shows
    q, k, v = qkv.split([layer.num_heads, heads, heads], 1)
    more = torch.zeros(spare_tokens, dtype=torch.int64)
    positions, kv_slots = torch.cat([positions, more]), torch.cat([kv_slots, more - 1])
    table = torch.cat([table, table.new_zeros(spare_rows, table.shape[1])])
    slots = torch.tensor(
        rng.sample(range(len(table) + 2), len(table))
    )  # in any order, and some without a row
    tables = table.new_zeros(len(table) + 2, table.shape[1]).index_copy_(0, slots, table)
    batch = ForwardBatch(
        input_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        kv_slots=kv_slots.to(device),
        query_start=torch.tensor(starts + [starts[-1]] * spare_rows, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens + [0] * spare_rows, dtype=torch.int32, device=device),
        block_table=tables.to(device),
        slots=slots.to(device),
        logit_index=torch.empty(0, dtype=torch.int64, device=device),
        kv=[_stored(layer, (old_k, old_v), head_first)],
        num_tokens=counts if unused is None else None,
        seq_bounds=np.array(lens, np.int32) + slack,
        block_size=block_size,
    )
    batch.attn = backend.plan(batch)
    old_k, old_v = (rounded(layer, x.view(-1, heads, dim), i) for i, x in enumerate((old_k, old_v)))
    return Case(layer, rows, batch, old_k, old_v, qkv, q, k, v)


def _stored(layer: Layer, kv: tuple[torch.Tensor, ...], head_first: bool) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a layer that hold these keys and values."""
    if layer.codes:
        coded = [_codes(layer, x, i) for i, x in enumerate(kv)]
        kv = tuple(codes for codes, _ in coded)
        if not layer.codes.static:
            kv += tuple(scale for _, scale in coded)
    return tuple(x.transpose(1, 2).contiguous() if head_first else x.clone() for x in kv)


def _codes(layer: Layer, x: torch.Tensor, which: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.codes
    scale = layer.kv_scales[which].unsqueeze(-1) if layer.kv_scales else None
    return round_heads(x, getattr(torch, layer.codes.dtype), scale)


def rounded(layer: Layer, x: torch.Tensor, which: int) -> torch.Tensor:
    """Return keys (which = 0) or values (1) [..., kv heads, dim] as the cache stores them, in float64 if as codes."""
    if layer.codes is None:
        return x
    codes, scale = _codes(layer, x, which)
    return codes.double() * scale.double()


def oracle(case: Case) -> torch.Tensor:
    """Compute attention in float64, [tokens, heads * dim]."""
    layer, batch, out, at = case.layer, case.batch, [], 0
    group = layer.num_heads // layer.num_kv_heads
    for row, (old, new) in enumerate(case.rows):
        seen = torch.arange(old, device=case.q.device)
        table = batch.block_table[batch.slots[row]]
        slots = table[seen // batch.block_size] * batch.block_size + seen % batch.block_size
        new_k, new_v = (rounded(layer, x[at : at + new], i) for i, x in enumerate((case.k, case.v)))
        keys = torch.cat([case.old_k[slots], new_k]).double().repeat_interleave(group, 1)
        values = torch.cat([case.old_v[slots], new_v]).double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", case.q[at : at + new].double(), keys) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        key = torch.arange(old + new, device=case.q.device)
        query = key[old:, None]
        visible = key <= query
        if layer.window:
            first = query // layer.window * layer.window if layer.chunked else query - layer.window + 1
            visible &= key >= first
        scores.masked_fill_(~visible, float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.double().view(-1, 1, 1).expand(-1, new, 1)
            scores = torch.cat((scores, sinks), -1)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : old + new], values))
        at += new
    return torch.cat(out).flatten(1)


def check(case: Case, backend: AttentionBackend) -> None:
    compare(backend.forward(case.layer, case.q, case.k, case.v, case.batch), case)


def compare(got: torch.Tensor, case: Case) -> None:
    want = oracle(case)
    assert got.shape == (case.q.shape[0], want.shape[1])
    assert got.dtype == case.q.dtype
    got = got[: want.shape[0]]
    if case.q.dtype == torch.float32:
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
    else:
        error = (got.double() - want).norm() / want.norm()
        assert error < (1e-2 if case.q.dtype == torch.bfloat16 else 2e-3), f"relative error {error:.1e}"


def check_packed(case: Case, backend: AttentionBackend, normed: bool) -> None:
    """Check the results of `forward_packed`, and the keys and values it wrote, against the separate operations."""
    layer, batch, dim = case.layer, case.batch, case.layer.head_dim
    device, dtype = case.q.device, case.q.dtype
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    norms = None
    if normed:
        norms = object.__new__(HeadNorm)  # without a checkpoint
        norms.weight = (1 + torch.randn(heads + kv_heads, dim, device=device) / 4).to(dtype)
        norms.eps, norms.rms = 1e-6, make_rms(norms.weight, dim, 1e-6)
    params = RopeParams(
        theta=10000.0, rotary_dim=2 * layer.span if layer.span > 1 else 0, interleaved=layer.span == 1
    )
    rope = Rope(params, dim, int(batch.positions.max()) + 1, device, dtype)
    plain = RotaryHeads(heads, kv_heads, dim, norms)
    flat = case.qkv.flatten(1)
    q, k, v = (x.clone() for x in plain(flat.clone(), rope.lookup(batch.positions)))
    turned = replace(case, q=q, k=k, v=v)
    assert backend.forward_packed
    compare(backend.forward_packed(layer, flat, norms, rope.table, batch), turned)
    if layer.codes:
        return  # the attention has read them
    stored = batch.kv_slots >= 0
    for blocks, old, new in zip(batch.kv[layer.index], (case.old_k, case.old_v), (k, v)):
        want = old.clone()
        want[batch.kv_slots[stored]] = new[stored]
        head_first = backend.kv_shape(2, 3, 5, 7) == (2, 5, 3, 7)
        got = (blocks.transpose(1, 2) if head_first else blocks).reshape(want.shape)
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(got.float(), want.float(), rtol=4 * ulp, atol=16 * ulp)
