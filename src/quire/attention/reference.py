"""The reference back end: paged attention in plain torch, for the CPU and as the oracle of the kernels.

Pages are [page, token, head, dim], so one gather by KV slot serves every page size. Rows with one new
token are batched, grouped by similar length; the query heads of a KV head become the query axis, so each
KV byte is read once (GQA packing). Longer rows run one by one. Host bounds give the shapes; where bounds
may exceed the device's lengths, a mask made on the device decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.attention.base import AttentionLayer, ForwardBatch, HeadNorms

_GROUP_TOKENS = 1 << 18  # KV entries gathered at once; bounds the memory of one group


@dataclass(slots=True)
class _Group:
    """Rows with one new token each, padded to one length."""

    tokens: torch.Tensor | None  # int64 [rows]: where the rows' tokens are; None: all tokens, in order
    kv: torch.Tensor  # int64 [rows * length]: KV slots to gather
    length: int
    positions: torch.Tensor  # int64 [length]
    last: torch.Tensor  # int64 [rows, 1]: position of each row's token
    mask: torch.Tensor | None  # bool [rows, 1, 1, length]; None: every row has exactly this length


@dataclass(slots=True)
class _Long:
    """One row with several new tokens."""

    start: int  # its first token on the token axis
    end: int
    kv: torch.Tensor  # int64 [length]
    mask: torch.Tensor | None  # bool [new, length]; None: plain causal, nothing before the row
    distance: torch.Tensor  # int64 [new, length]: query position - key position


@dataclass(slots=True)
class _Plan:
    groups: list[_Group]
    longs: list[_Long]


class ReferenceAttention:
    name = "reference"
    capturable = False  # shapes follow the lengths of the rows
    takes_packed = reads_shared = False

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, block_size, num_kv_heads, head_dim)

    # ------------------------------------------------------------------------------- per step

    def plan(self, batch: ForwardBatch) -> _Plan:
        # On a CPU reading the lengths costs no wait, so bounds are exact there.
        bounds = (batch.seq_lens if batch.seq_lens.device.type == "cpu" else batch.seq_bounds).tolist()
        ones: list[int] = []
        longs: list[_Long] = []
        counts = batch.num_tokens
        assert counts is not None, "bounds only: not for a back end that cannot be captured"
        starts = [0, *counts.cumsum().tolist()]
        for row, n in enumerate(counts.tolist()):
            if n == 1:
                ones.append(row)
            else:
                longs.append(self._long(batch, row, starts[row], starts[row + 1], bounds[row]))
        ones.sort(key=bounds.__getitem__)
        groups, begin = [], 0
        for end in range(1, len(ones) + 1):
            if end == len(ones) or self._splits(bounds[ones[begin]], bounds[ones[end]], end + 1 - begin):
                groups.append(self._group(batch, ones[begin:end], starts, bounds[ones[end - 1]]))
                begin = end
        return _Plan(groups, longs)

    def _splits(self, shortest: int, longest: int, rows: int) -> bool:
        """Whether a longer row should start a group of its own rather than pad the others."""
        return longest > 2 * shortest + 64 or rows * longest > _GROUP_TOKENS

    def _group(self, batch: ForwardBatch, rows: list[int], starts: list[int], length: int) -> _Group:
        device = batch.seq_lens.device
        rows = sorted(rows)
        everything = len(rows) == batch.seq_lens.shape[0]
        positions = torch.arange(length, device=device)
        table, lens = batch.block_table, batch.seq_lens
        if not everything:
            index = _send(rows, device)
            table, lens = table.index_select(0, index), lens.index_select(0, index)
        kv = _kv_slots(table, positions, batch.block_size)
        exact = device.type == "cpu" and len(rows) == 1
        last = lens.long().unsqueeze(1) - 1
        return _Group(
            tokens=None if everything else _send([starts[row] for row in rows], device),
            kv=kv.flatten(),
            length=length,
            positions=positions,
            last=last,
            mask=None if exact else (positions <= last)[:, None, None, :],
        )

    def _long(self, batch: ForwardBatch, row: int, start: int, end: int, length: int) -> _Long:
        device = batch.seq_lens.device
        positions = torch.arange(length, device=device)
        kv = _kv_slots(batch.block_table[row : row + 1], positions, batch.block_size)[0]
        distance = batch.positions[start:end, None] - positions
        fresh = length == end - start
        return _Long(start, end, kv, None if fresh else distance >= 0, distance)

    # ------------------------------------------------------------------------------ per layer

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, values = (x.view(-1, layer.num_kv_heads, layer.head_dim) for x in batch.kv[layer.index])
        keys.index_copy_(0, batch.kv_slots, k.view(-1, layer.num_kv_heads, layer.head_dim))
        values.index_copy_(0, batch.kv_slots, v.view(-1, layer.num_kv_heads, layer.head_dim))
        q = q.view(-1, layer.num_heads, layer.head_dim)
        plan: _Plan = batch.attn
        out = q.new_empty(q.shape[0], layer.num_heads * layer.head_dim)
        for group in plan.groups:
            if group.tokens is None:  # the only group, and nothing else
                return self._attend_group(layer, group, q, keys, values)
            rows = q.index_select(0, group.tokens)
            out.index_copy_(0, group.tokens, self._attend_group(layer, group, rows, keys, values))
        for long in plan.longs:
            out[long.start : long.end] = self._attend_long(
                layer, long, q[long.start : long.end], keys, values
            )
        return out

    def forward_packed(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        raise NotImplementedError("not without `takes_packed`")

    def _attend_group(
        self, layer: AttentionLayer, group: _Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        rows, heads, dim = q.shape[0], layer.num_kv_heads, layer.head_dim
        k = keys.index_select(0, group.kv).view(rows, group.length, heads, dim).transpose(1, 2)
        v = values.index_select(0, group.kv).view(rows, group.length, heads, dim).transpose(1, 2)
        mask = group.mask
        if layer.window is not None and group.length > layer.window:
            near = (group.positions > group.last - layer.window)[:, None, None, :]
            mask = near if mask is None else mask & near
        packed = q.view(rows, heads, layer.num_heads // heads, dim)
        out = _attend(packed, k, v, mask, False, layer)
        return out.reshape(rows, layer.num_heads * dim)

    def _attend_long(
        self, layer: AttentionLayer, long: _Long, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        k = keys.index_select(0, long.kv).transpose(0, 1).unsqueeze(0)  # [1, kv heads, length, dim]
        v = values.index_select(0, long.kv).transpose(0, 1).unsqueeze(0)
        group = layer.num_heads // layer.num_kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mask = long.mask
        if layer.window is not None and long.kv.shape[0] > layer.window:
            mask = (long.distance >= 0) & (long.distance < layer.window)
        elif layer.soft_cap is not None:
            mask = long.distance >= 0
        out = _attend(q.transpose(0, 1).unsqueeze(0), k, v, mask, mask is None, layer)
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)


def _send(values: list[int], device: torch.device) -> torch.Tensor:
    """Host integers as an int64 device tensor, without waiting for the device."""
    host = torch.tensor(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _kv_slots(table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """KV slot of each position of each row: int64 [rows, positions]."""
    if block_size == 1:
        return table[:, : positions.shape[0]].long()
    blocks = table.index_select(1, positions // block_size).long()
    return blocks * block_size + positions % block_size


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    layer: AttentionLayer,
) -> torch.Tensor:
    """softmax(cap(q k^T * scale) + mask) v over [rows, heads, queries, dim]."""
    if layer.soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scale)
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * layer.scale
    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
