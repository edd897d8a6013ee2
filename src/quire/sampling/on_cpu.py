"""Fast argmax, topk and draw over long rows on a CPU.

For a row of 150,000 logits, PyTorch's argmax and topk take ten times as long as reading the row. Here numpy
computes the argmax, and topk works on chunks. The results are identical.

The k largest values of a row are in the k chunks with the largest maxima, because each of these chunks holds a
value at least as large as every value of the other chunks. Computing the maxima reads the row once; the rest
reads k chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.sampling.noise import gumbel

_CHUNK = 64  # about sqrt(vocabulary / k), which makes both topks equally long
_MIN_CHUNKS = 8  # per value that is looked for; with fewer chunks nothing is gained


@dataclass(slots=True)
class TopCandidates:
    """A subset of each row's tokens, in ascending order, that includes those with its k largest values."""

    values: Tensor  # [rows, n]
    tokens: Tensor  # int64 [rows, n]
    rest: Tensor  # [rows, 1]: upper bound of the values that were left out


def highest(x: Tensor) -> Tensor:
    """Return the index of the first largest value of each row of x [rows, n], int64 [rows]."""
    if x.device.type != "cpu":
        return x.argmax(1)
    if x.dtype != torch.float32:
        # Positive 16-bit floats have the order of their bits as integers, and negative ones are smaller.
        codes = x.view(torch.int16).numpy()
        at = codes.argmax(1)
        if (np.take_along_axis(codes, at[:, None], 1) > 0).all():
            return torch.from_numpy(at)
    return torch.from_numpy(x.float().numpy().argmax(1))


def top_candidates(x: Tensor, k: int) -> TopCandidates | None:
    """Return candidates for the k largest values of x float32 [rows, vocab], which holds no NaN.

    Returns None if k is so large that a topk of the whole row is as fast.
    """
    rows, vocab = x.shape
    count = vocab // _CHUNK
    if count < _MIN_CHUNKS * k:
        return None
    maxima = x[:, : count * _CHUNK].unflatten(1, (count, _CHUNK)).amax(2)  # [rows, chunks]
    best = maxima.topk(k + 1)
    chunks = best.indices[:, :k].sort(1).values  # [rows, k]
    tokens = (chunks.unsqueeze(2) * _CHUNK + torch.arange(_CHUNK)).flatten(1)
    remainder = torch.arange(count * _CHUNK, vocab).expand(rows, -1)
    tokens = torch.cat((tokens, remainder), 1)
    return TopCandidates(x.gather(1, tokens), tokens, best.values[:, k:])


def largest(x: Tensor, k: int) -> Tensor:
    """Return the k largest values of each row of x [rows, vocab], in descending order."""
    candidates = top_candidates(x, k) if x.device.type == "cpu" else None
    return (x if candidates is None else candidates.values).topk(k).values


def draw(x: Tensor, keep: Tensor, tokens: Tensor | None, vocab: int, k0: Tensor, k1: Tensor) -> Tensor:
    """Draw one of the kept tokens of each row by the Gumbel-max trick, computing noise for these tokens only.

    Args:
        x: logits divided by the temperature, [rows, n].
        keep: the tokens that may be drawn, bool [rows, n].
        tokens: token ids of the columns, int64 [rows, n]; None: the column is the token id.
        vocab: size of the vocabulary.
        k0, k1: the rows' noise keys, see `row_keys`.

    Returns:
        Token ids, int64 [rows]. Of equal sums the lowest id wins, as with argmax. Rows that keep no token get 0.
    """
    row, token = keep.nonzero(as_tuple=True)
    values = x[row, token]
    if tokens is not None:
        token = tokens[row, token]
    noisy = values + gumbel(k0[row], k1[row], token.to(torch.int32))
    best = torch.full_like(x[:, 0], -torch.inf).scatter_reduce_(0, row, noisy, "amax")  # [rows]
    first = torch.where(noisy == best[row], token, vocab)
    return torch.full_like(best, vocab, dtype=torch.int64).scatter_reduce_(0, row, first, "amin") % vocab
