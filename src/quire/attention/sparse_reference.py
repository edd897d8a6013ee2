"""The choice of tokens by index scores in plain PyTorch, for CPUs and as the oracle of the kernels."""

from __future__ import annotations

import torch


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the index scores float32 [tokens, length]: sums over heads of weights * max(q . k, 0).

    Args:
        q: [tokens, heads, dim].
        keys: [tokens or 1, length, dim].
        weights: float32 [tokens, heads].
    """
    products = torch.matmul(q.float(), keys.float().mT).relu_()  # [tokens, heads, length]
    return torch.matmul(weights.unsqueeze(1), products).squeeze(1)


def largest(scores: torch.Tensor, mask: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """Return the positions of the `top_k` largest scores, or of all if there are fewer, then -1, int32.

    Args:
        scores: float32 [tokens, length].
        mask: bool [tokens, length], False where a position does not count; None: all count.
        top_k: number of positions.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    best = scores.topk(min(top_k, scores.shape[1]), 1)
    return best.indices.masked_fill(best.values == float("-inf"), -1).int()


def chosen_mask(chosen: torch.Tensor, length: int) -> torch.Tensor:
    """Return the choice int32 [tokens, k] as a mask, bool [tokens, length]."""
    mask = torch.zeros(chosen.shape[0], length + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, chosen.long() % (length + 1), True)[:, :length]  # -1 becomes the extra column


def chosen_slots(kv: torch.Tensor | slice, length: int, chosen: torch.Tensor) -> torch.Tensor:
    """Return the KV slots of a choice, int64 [rows, k]; where nothing is chosen, those of position 0.

    Args:
        kv: KV slots of all positions of the rows, [rows * length].
        length: positions per row.
        chosen: int32 [rows, k].
    """
    positions = chosen.long().clamp(min=0)
    if isinstance(kv, slice):
        return kv.start + torch.arange(len(chosen), device=chosen.device)[:, None] * length + positions
    return kv.view(-1, length).gather(1, positions)
