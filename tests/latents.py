"""Random ragged batches of latent attention, and its oracle: row by row, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.layers.mla import LatentAttention
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
    rotary: torch.Tensor
    entries: torch.Tensor
    rotation: Rotation

    def run(self) -> torch.Tensor:
        """Attend with copies of the inputs, and return the rows of real tokens."""
        tokens = sum(new for _, new in self.rows)
        return self.layer(self.q.clone(), self.rotary, self.entries, self.rotation, self.batch)[:tokens]


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
    block_size: int = 16,
    interleaved: bool = True,
    slack: int = 0,
    unused: tuple[int, int] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LatentCase:
    """Draw a case; `slack` and `unused` are those of `make_case`."""
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
    layer = LatentAttention(env, 0, heads, kv, rank, dim**-0.5, norm_of(weight), params.span(rotary))
    # Entries and the rotated part of queries are slices of wider rows, as fused projections leave them.
    wide = torch.randn(count, 8 + dim, device=device).to(dtype)
    wide_q = torch.randn(count, heads, 8 + rotary, device=device).to(dtype)
    q = case.q.clone()
    q[..., rank:] = float("nan")  # undefined
    longest = int(batch.positions.max()) + 1
    rope = Rope(params, rotary, longest, torch.device(device), dtype)
    return LatentCase(layer, rows, batch, old, q, wide_q[..., 8:], wide[:, 8:], rope.lookup(batch.positions))


def latent_oracle(case: LatentCase) -> torch.Tensor:
    """Compute latent attention in float64, [tokens, heads * rank]."""
    layer, batch, out, at = case.layer, case.batch, [], 0
    q = case.q.clone()
    entries = layer.prepare(q, case.rotary, case.entries, case.rotation).double()
    for row, (old, new) in enumerate(case.rows):
        seen = torch.arange(old, device=q.device)
        table = batch.block_table[batch.slots[row]]
        slots = table[seen // batch.block_size] * batch.block_size + seen % batch.block_size
        keys = torch.cat([case.old[slots].double(), entries[at : at + new]])
        scores = torch.einsum("qhd,kd->hqk", q[at : at + new].double(), keys) * layer.scale
        key = torch.arange(old + new, device=q.device)
        scores.masked_fill_(key > key[old:, None], float("-inf"))
        out.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, : layer.rank]))
        at += new
    return torch.cat(out).flatten(1)


def check_latents(case: LatentCase) -> None:
    """Compare results and written entries with the oracle."""
    want, got = latent_oracle(case), case.run()
    assert got.shape == want.shape and got.dtype == case.q.dtype
    assert relative(got, want) < tolerance(case.q.dtype)
    tokens = len(want)
    written = case.batch.kv[0][0].reshape(-1, case.layer.dim)
    expected = case.old.clone()
    entries = case.layer.prepare(case.q.clone(), case.rotary, case.entries, case.rotation)
    expected[case.batch.kv_slots[:tokens]] = entries[:tokens]
    ulp = torch.finfo(case.q.dtype).eps
    torch.testing.assert_close(written.float(), expected.float(), rtol=4 * ulp, atol=16 * ulp)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
