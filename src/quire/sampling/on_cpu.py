"""Looking at a row of 150,000 logits on a CPU, where torch's argmax and topk take ten times as long as reading
the row: numpy's argmax, and a topk of chunks. Both give exactly what torch gives.

The k largest values of a row lie in the k chunks with the largest maxima: each of these holds a value that is
at least as large as all of any other chunk. Finding the maxima is one reading; all else looks at k chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.sampling.noise import gumbel

_CHUNK = 64  # about sqrt(vocabulary / k), where both topks are equally long
_FEW = 8  # chunks per wanted value, below which nothing is gained


@dataclass(slots=True)
class TopCandidates:
    """Tokens of each row, in ascending order, among which are those with its k largest values."""

    values: Tensor  # [rows, n]
    tokens: Tensor  # int64 [rows, n]
    rest: Tensor  # [rows, 1]: no token that was left out has a larger value


def highest(x: Tensor) -> Tensor:
    """int64 [rows]: the first of the largest values of each row of x [rows, n]; on other devices, torch's argmax."""
    if x.device.type != "cpu":
        return x.argmax(1)
    if (
        x.dtype != torch.float32
    ):  # positive halves have the order of their bits, and negative ones less than these
        codes = x.view(torch.int16).numpy()
        at = codes.argmax(1)
        if (np.take_along_axis(codes, at[:, None], 1) > 0).all():
            return torch.from_numpy(at)
    return torch.from_numpy(x.float().numpy().argmax(1))


def contenders(x: Tensor, k: int) -> TopCandidates | None:
    """Of x float32 [rows, vocab] without nan; None: so many are wanted that a topk over all is as good."""
    rows, vocab = x.shape
    count = vocab // _CHUNK
    if count < _FEW * k:
        return None
    maxima = x[:, : count * _CHUNK].unflatten(1, (count, _CHUNK)).amax(2)  # [rows, chunks]
    best = maxima.topk(k + 1)
    chunks = best.indices[:, :k].sort(1).values  # [rows, k]
    tokens = (chunks.unsqueeze(2) * _CHUNK + torch.arange(_CHUNK)).flatten(1)
    remainder = torch.arange(count * _CHUNK, vocab).expand(rows, -1)
    tokens = torch.cat((tokens, remainder), 1)
    return TopCandidates(x.gather(1, tokens), tokens, best.values[:, k:])


def largest(x: Tensor, k: int) -> Tensor:
    """The k largest values of each row of x [rows, vocab], descending; on other devices, torch's topk."""
    found = contenders(x, k) if x.device.type == "cpu" else None
    return (x if found is None else found.values).topk(k).values


def draw(x: Tensor, keep: Tensor, tokens: Tensor | None, vocab: int, k0: Tensor, k1: Tensor) -> Tensor:
    """int64 [rows]: Gumbel-max over the kept values of x [rows, n], with noise for these alone.

    They are the values of `tokens` [rows, n] (None: of all, in order). Of equals the lowest token is drawn, as
    by argmax; token 0 where nothing is kept.
    """
    row, token = keep.nonzero(as_tuple=True)
    values = x[row, token]
    if tokens is not None:
        token = tokens[row, token]
    noisy = values + gumbel(k0[row], k1[row], token.to(torch.int32))
    best = torch.full_like(x[:, 0], -torch.inf).scatter_reduce_(0, row, noisy, "amax")  # [rows]
    first = torch.where(noisy == best[row], token, vocab)
    return torch.full_like(best, vocab, dtype=torch.int64).scatter_reduce_(0, row, first, "amin") % vocab
