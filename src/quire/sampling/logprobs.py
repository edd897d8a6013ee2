"""Log-probabilities and ranks of given tokens and of the most likely ones, from unprocessed logits.

Only [rows, 1 + k] values are normalised, with the row's log-sum-exp in float32. Rows are scored in pieces, so that
scoring a long prompt does not need a float32 copy of all its logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

Logprobs = tuple[Tensor, Tensor, Tensor]  # ids int32 [n, 1+k], values float32 [n, 1+k], ranks int32 [n]

_PIECE_ELEMENTS = 1 << 24  # 64 MiB of float32
# Peak bytes per logit: the float32 copy, its exponentials, the scratch memory of topk, the comparison for ranks.
_BYTES_PER_LOGIT = 4 + 4 + 8 + 1


def scoring_bytes(rows: int, vocab: int, itemsize: int) -> int:
    """Return the peak bytes for computing and scoring the logits of `rows` tokens, `scored_rows` at a time."""
    return min(rows, scored_rows(vocab)) * vocab * (itemsize + _BYTES_PER_LOGIT)


def scored_rows(vocab: int) -> int:
    """Return the number of rows that `score` processes at once."""
    return max(1, _PIECE_ELEMENTS // vocab)


def score(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    """Compute the log-probabilities of the targets and of the k most likely tokens.

    Args:
        logits: [n, vocab].
        targets: token ids, int64 [n].
        k: number of most likely tokens, at most the vocabulary's size.

    Returns:
        ids int32 [n, 1 + k] and values float32 [n, 1 + k], column 0 being the target and the others the most likely
        tokens in descending order; and the targets' ranks int32 [n], where 1 is the most likely token.
    """
    rows, vocab = logits.shape
    piece = scored_rows(vocab)
    if rows <= piece:
        return _score(logits, targets, min(k, vocab))
    parts = [
        _score(part, wanted, min(k, vocab)) for part, wanted in zip(logits.split(piece), targets.split(piece))
    ]
    ids, values, ranks = zip(*parts)
    return torch.cat(ids), torch.cat(values), torch.cat(ranks)


def _score(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    logits = logits.float()  # [n, vocab]
    ids = targets.unsqueeze(1)  # [n, 1]
    chosen = logits.gather(1, ids)
    ranks = (logits > chosen).sum(1, dtype=torch.int32) + 1
    values = chosen
    if k:
        top_values, top_ids = logits.topk(k)  # [n, k]
        ids, values = torch.cat((ids, top_ids), 1), torch.cat((chosen, top_values), 1)
    values = values - logits.logsumexp(1, keepdim=True)
    return ids.to(torch.int32), values, ranks
