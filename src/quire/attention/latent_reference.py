"""Attention over latent entries in plain PyTorch, for CPUs and as the oracle of the kernels."""

from __future__ import annotations

import torch

from quire.attention.base import LatentLayer


def attend_latents(
    q: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor | None, layer: LatentLayer
) -> torch.Tensor:
    """Compute softmax(q entries^T * scale + mask) times the first `rank` numbers of the entries, in fp32.

    A masked entry contributes nothing to a query, even if it is not finite.

    Args:
        q: [rows, queries, dim].
        entries: [rows, keys, dim].
        mask: bool [rows, queries or 1, keys], True where a query sees a key; None if every query sees every key.
        layer: supplies the scale and the rank.

    Returns:
        [rows, queries, rank].
    """
    keys = entries.float()
    non_finite = ~keys.sum(-1).isfinite()  # [rows, keys]
    keys = keys.masked_fill(non_finite.unsqueeze(-1), 0)
    scores = torch.bmm(q.float(), keys.mT).mul_(layer.scale)
    scores.masked_fill_(non_finite.unsqueeze(1), float("nan"))
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.bmm(scores.softmax(-1), keys[..., : layer.rank]).to(q.dtype)
