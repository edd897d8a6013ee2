"""Attention over gathered keys and values in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.attention.base import AttentionLayer

_FEW_QUERIES = 32  # rows of up to this many queries need no padding: 2 MiB after 1,200 random shapes
_QUERY_STEP, _KEY_STEP = 32, 64  # numbers of queries and keys that 16-bit attention is padded to
# Padding a short prompt to 64 would cost up to 1.7 times its attention; steps of 16 add 14 shapes in all.
_SHORT_PROMPT, _SHORT_STEP = 256, 16


def attend_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    layer: AttentionLayer,
) -> torch.Tensor:
    """Compute softmax(cap(q k^T * scale) + mask) v. The layer's sinks join the sum of the softmax.

    A masked key contributes nothing to a query, even if it is not finite.

    Args:
        q: [rows, heads, queries, dim].
        k, v: [rows, heads or KV heads, keys, dim].
        mask: bool, True where a query sees a key; None with `causal`, or if every query sees every key.
        causal: query i sees the keys 0 .. i.
        layer: supplies the scale, the soft cap and the sinks.
    """
    if (mask is None and not causal) or _known_finite(k, v):
        return _attend_finite(q, k, v, mask, causal, layer)
    non_finite = ~(k.float().sum((1, 3)) + v.float().sum((1, 3))).isfinite()  # [rows, keys]
    k, v = (x.masked_fill(non_finite[:, None, :, None], 0) for x in (k, v))
    out = _attend_finite(q, k, v, mask, causal, layer)
    if mask is None:
        sees_non_finite = non_finite.cumsum(1) > 0  # the i-th query sees the first i + 1 keys
    else:
        visible = mask[:, 0] if mask.dim() == 4 else mask
        sees_non_finite = (visible & non_finite.unsqueeze(1)).any(-1)  # [rows, queries or 1]
    return out.masked_fill(sees_non_finite[:, None, :, None], float("nan"))


def _known_finite(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether all numbers are certainly finite. Only a CPU can tell without waiting.

    A plain sum is ten times as fast as any other test of 16-bit numbers. An overflow counts as "no".
    """
    return k.device.type == "cpu" and bool((k.sum() + v.sum()).isfinite())


def _attend_finite(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    layer: AttentionLayer,
) -> torch.Tensor:
    """Compute `attend_gathered` for finite k and v: a probability of 0 times a non-finite number would be NaN."""
    explicit = keeps_scores(layer)
    if q.shape[1] != k.shape[1] and (explicit or q.device.type != "cpu"):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    queries = q.shape[2]
    if not explicit:
        if q.device.type == "cpu" and q.dtype != torch.float32 and queries > _FEW_QUERIES:
            q, k, v, mask = pad_shapes(q, k, v, mask, causal)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scale, enable_gqa=q.shape[1] != k.shape[1]
        )[:, :, :queries]
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if layer.sinks is None:
        return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
    # A row of one token has its query heads on the axis of queries: both orders are those of the heads.
    shape = (1, q.shape[1], layer.num_heads // q.shape[1], 1)
    sinks = layer.sinks.view(shape).expand(*scores.shape[:3], 1)
    probs = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return torch.matmul(probs, v.float()).to(q.dtype)


def keeps_scores(layer: AttentionLayer) -> bool:
    """Return whether all scores of a layer are computed at once, because PyTorch's attention cannot change them."""
    return layer.soft_cap is not None or layer.sinks is not None


def pad_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Pad queries and keys so that their numbers take few different values.

    For 16-bit types PyTorch generates code for each new pair of numbers, in each thread, and keeps it for good: a
    quarter of a MiB on average. Few queries are multiplied in another way and need no padding.
    """
    queries, keys = q.shape[2], k.shape[2]
    if causal:  # as many queries as keys
        more_queries = more_keys = -keys % (_SHORT_STEP if keys <= _SHORT_PROMPT else _KEY_STEP)
    else:
        more_queries, more_keys = -queries % _QUERY_STEP, -keys % _KEY_STEP
    if not (more_keys or more_queries):
        return q, k, v, mask
    if more_keys and not causal:
        if mask is None:
            mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)
        mask = F.pad(mask, (0, more_keys), value=False)
    if mask is not None and mask.shape[-2] > 1:
        mask = F.pad(mask, (0, 0, 0, more_queries), value=True)
    k, v = (F.pad(x, (0, 0, 0, more_keys)) if more_keys else x for x in (k, v))
    return F.pad(q, (0, 0, 0, more_queries)) if more_queries else q, k, v, mask
