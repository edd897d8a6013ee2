"""Random ragged batches of latent attention, and its oracle: row by row, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.layers.mla import LatentAttention, LatentExpansion
from quire.layers.norm import RMSNorm, make_rms
from quire.layers.rope import Rope, Rotation
from quire.layers.rope_params import RopeParams
from quire.types import KVLayout, KVTensor
from ragged import Layer, Rows, make_case


@dataclass
class LatentCase:
    """One layer's inputs for a batch; `old` [slots, dim] lacks the new entries."""

    layer: LatentAttention
    rows: Rows
    batch: ForwardBatch
    old: torch.Tensor
    q: torch.Tensor
    entries: torch.Tensor
    rotation: Rotation

    def run(self) -> torch.Tensor:
        """Attend, and return the rows of real tokens."""
        tokens = sum(new for _, new in self.rows)
        return self.layer(self.q, self.entries, self.rotation, self.batch)[:tokens]

    def prepared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated queries, and the normed and rotated entries."""
        q = self.q.clone()
        rotary = q[..., self.layer.expansion.content_dim :].clone()
        return q, self.layer.prepare(q, rotary, self.entries, self.rotation)


def norm_of(weight: torch.Tensor, eps: float = 1e-6) -> RMSNorm:
    """Return a norm without a checkpoint."""
    norm = object.__new__(RMSNorm)
    norm.weight, norm.eps, norm.alone = weight, eps, make_rms(weight, len(weight), eps)
    return norm


def latent_case(
    seed: int,
    backend: AttentionBackend,
    rows: Rows,
    heads: int = 4,
    rank: int = 32,
    rotary: int = 16,
    content: int = 24,
    value: int = 20,
    block_size: int = 16,
    interleaved: bool = True,
    slack: int = 0,
    unused: tuple[int, int] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LatentCase:
    """Draw a case; `slack` and `unused` are those of `make_case`, `content` and `value` the sizes of a head."""
    torch.manual_seed(seed)
    dim = rank + rotary
    case = make_case(
        random.Random(seed),
        backend,
        Layer(heads, 1, dim, 1.0),
        rows,
        block_size,
        device,
        dtype,
        slack,
        unused,
    )
    batch, count = case.batch, case.q.shape[0]
    old = case.old_k.view(-1, dim)
    batch.kv = [(old.view(backend.kv_shape(len(old) // block_size, block_size, 1, dim)).clone(),)]
    batch.attn = backend.plan(batch)
    weight = (1 + torch.randn(rank, device=device) / 4).to(dtype)
    params = RopeParams(theta=10000.0, interleaved=interleaved)
    env = SimpleNamespace(attention=backend)
    kv = KVLayout((KVTensor(1, dim, str(dtype).removeprefix("torch.")),))
    weight_kv = (torch.randn(heads * (content + value), rank, device=device) / rank**0.5).to(dtype)
    expansion = LatentExpansion.of_weight(weight_kv, content, rotary, value)
    scale, span = (content + rotary) ** -0.5, params.span(rotary)
    layer = LatentAttention(env, 0, heads, kv, expansion, scale, norm_of(weight), span)
    # Entries and queries are slices of wider rows, as fused projections leave them.
    wide = torch.randn(count, 8 + dim, device=device).to(dtype)
    wide_q = torch.randn(count, 8 + heads * (content + rotary), device=device).to(dtype)
    for tensor in (wide, wide_q):
        tensor[sum(new for _, new in rows) :] = float("nan")  # so that reading them shows
    q = wide_q[:, 8:].unflatten(1, (heads, -1))
    longest = int(batch.positions.max()) + 1
    rope = Rope(params, rotary, longest, torch.device(device), dtype)
    return LatentCase(layer, rows, batch, old, q, wide[:, 8:], rope.lookup(batch.positions))


def latent_oracle(case: LatentCase) -> torch.Tensor:
    """Compute latent attention over expanded keys and values in float64, [tokens, heads * value dim]."""
    layer, batch, out, at = case.layer, case.batch, [], 0
    q, entries = (x.double() for x in case.prepared())
    for row, (old, new) in enumerate(case.rows):
        seen = torch.arange(old, device=q.device)
        table = batch.block_table[batch.slots[row]]
        slots = table[seen // batch.block_size] * batch.block_size + seen % batch.block_size
        found = torch.cat([case.old[slots].double(), entries[at : at + new]])
        key = torch.arange(old + new, device=q.device)
        out.append(attend_written_out(layer, q[at : at + new], found, key <= key[old:, None]))
        at += new
    return torch.cat(out)


def attend_written_out(
    layer: LatentAttention, q: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention of float64 queries over the entries that `mask` [queries, entries] shows."""
    expansion, heads = layer.expansion, layer.num_heads
    weight = expansion.weight.double().view(heads, -1, layer.rank)
    k, v = torch.einsum("hwr,kr->khw", weight, entries[:, : layer.rank]).split(
        [expansion.content_dim, expansion.value_dim], 2
    )
    k = torch.cat((k, entries[:, None, layer.rank :].expand(-1, heads, -1)), 2)
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v).flatten(1)


def check_latents(case: LatentCase) -> None:
    """Compare results and written entries with the oracle."""
    want, got = latent_oracle(case), case.run()
    assert got.shape == want.shape and got.dtype == case.q.dtype
    assert relative(got, want) < tolerance(case.q.dtype)
    tokens = len(want)
    written = case.batch.kv[0][0].reshape(-1, case.layer.dim)
    expected = case.old.clone()
    entries = case.prepared()[1]
    expected[case.batch.kv_slots[:tokens]] = entries[:tokens]
    ulp = torch.finfo(case.q.dtype).eps
    torch.testing.assert_close(written.float(), expected.float(), rtol=4 * ulp, atol=16 * ulp)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
