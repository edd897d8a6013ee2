"""min_p, top_k and top_p as one number per row: the smallest logit that may still be drawn.

A row keeps the tokens with `x >= cutoff`, so tokens of equal logit are kept or dropped together and
nothing depends on the order of a sort. The one exception: where a single token of the largest logit has the
mass that top_p asks for, the first of them is chosen, so a tiny top_p is greedy. min_p comes first, then top_k, then top_p over what is left.

Small top_k: the k best values (`topk`) hold the answer. Otherwise: bisection over the integer image of
float32, which has the order of the floats; 32 halvings are exact (on a CPU, two digits). None sorts the
vocabulary.
Probability mass is counted in integers of 2^-40 of the top token's, so sums are exact in any order and
a row's cutoff does not depend on the rows beside it.
Sources: top-k, Fan et al. (arXiv:1805.04833); top-p, Holtzman et al. (arXiv:1904.09751); min-p, Nguyen
et al. (arXiv:2407.01082).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.sampling.columns import RowColumns, rows_where
from quire.sampling.on_cpu import largest

MAX_CANDIDATES = 1024  # top_k up to this is found by `topk`
_TRY = 256  # candidates looked at on a CPU before a search over all tokens
_UNIT = 2.0**40
_SIGN_FREE = (1 << 31) - 1
_MINUS_INF = -0x7F800001  # among the ordered integers
_LOWEST = torch.finfo(torch.float32).min


@dataclass(slots=True)
class FilterFlags:
    """Host copies of what decides the work of a step, one entry per slot or per row."""

    top_k: np.ndarray  # int64, 0: off
    top_p: np.ndarray  # bool
    min_p: np.ndarray  # bool

    @classmethod
    def empty(cls, num_slots: int) -> FilterFlags:
        return cls(
            np.zeros(num_slots, np.int64), np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.bool_)
        )

    def at(self, index: np.ndarray) -> FilterFlags:
        return FilterFlags(self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def used(self) -> np.ndarray:
        return (self.top_k > 0) | self.top_p | self.min_p

    @property
    def any(self) -> bool:
        return bool(self.top_k.any() or self.top_p.any() or self.min_p.any())


@dataclass(slots=True)
class Kept:
    """What filters leave of each row."""

    cutoff: Tensor  # float32 [rows, 1]: tokens below it are out
    greedy: Tensor  # bool [rows]: the first token with the largest logit is all that is kept


def kept(x: Tensor, flags: FilterFlags, columns: RowColumns) -> Kept:
    """What the filters leave of `x` [rows, vocab], which holds no nan and no +inf."""
    top = x.amax(1, keepdim=True).clamp_(min=_LOWEST)  # finite, also where all tokens are masked
    cutoff = top + columns.float32("log_min_p").unsqueeze(1)  # [rows, 1]; -inf where min_p is off
    greedy = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    small_k = (flags.top_k > 0) & (flags.top_k <= MAX_CANDIDATES)
    if small_k.any():
        rows = rows_where(small_k, x.device)
        k = columns.int64("top_k")[rows].unsqueeze(1)
        p = columns.float64("top_p")[rows].unsqueeze(1)
        most, with_p = int(flags.top_k[small_k].max()), bool(flags.top_p[small_k].any())
        cutoff[rows], greedy[rows] = _by_candidates(x[rows], top[rows], cutoff[rows], k, p, most, with_p)
    wide = ~small_k & (flags.top_p | (flags.top_k > 0))
    if wide.any():
        rows = rows_where(wide, x.device)
        k = columns.int64("top_k")[rows].unsqueeze(1)
        p = columns.float64("top_p")[rows].unsqueeze(1)
        chosen = flags.at(wide)
        cutoff[rows], greedy[rows] = _by_search(x[rows], top[rows], cutoff[rows], k, p, chosen)
    return Kept(cutoff, greedy)


def _mass(x: Tensor, top: Tensor, cutoff: Tensor) -> Tensor:
    """Unnormalised probability of the tokens that are kept, in units of 2^-40 of the top token's."""
    return (x - top).exp_().mul_(_UNIT).masked_fill_(x < cutoff, 0).to(torch.int64)


def _needed(total: Tensor, p: Tensor) -> Tensor:
    """The mass that top_p asks for; a part in 10^6 is forgiven, about the rounding of float32 logits."""
    return (total * (p - 1e-6)).ceil_().to(torch.int64).clamp_(min=1)


def _one_is_enough(need: Tensor, p: Tensor) -> Tensor:
    """Whether one token of the largest logit has the mass `need` that top_p asks for, bool [rows]."""
    return ((p < 1) & (need <= int(_UNIT))).squeeze(1)


def _by_candidates(
    x: Tensor, top: Tensor, cutoff: Tensor, k: Tensor, p: Tensor, most: int, with_p: bool
) -> tuple[Tensor, Tensor | bool]:
    """Rows with 0 < k <= most, `most` being the largest k among them."""
    most = min(most, x.shape[1])
    best = largest(x, most)  # [rows, most], descending
    cutoff = torch.maximum(cutoff, best.gather(1, k.clamp(max=most) - 1))
    if not with_p:
        return cutoff, False
    mass = _mass(best, top, cutoff)
    # Tokens that equal the k-th best are kept too, even where they are more than the candidates.
    ties = (x == cutoff).sum(1, keepdim=True) - (best == cutoff).sum(1, keepdim=True)
    total = mass.sum(1, keepdim=True) + ties * _mass(cutoff, top, cutoff)
    need = _needed(total, p)
    reached, _ = _reach(best, mass, need)
    return torch.maximum(cutoff, torch.where(p < 1, reached, cutoff)), _one_is_enough(need, p)


def _reach(best: Tensor, mass: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """The candidate whose cumulated mass reaches `need` (else the last one), and whether there is one."""
    short = (mass.cumsum(1) < need).sum(1, keepdim=True)
    return best.gather(1, short.clamp(max=best.shape[1] - 1)), short < best.shape[1]


def _by_search(
    x: Tensor, top: Tensor, cutoff: Tensor, k: Tensor, p: Tensor, flags: FilterFlags
) -> tuple[Tensor, Tensor | bool]:
    """Rows with top_p alone, or with a top_k beyond the candidates."""
    if flags.top_k.any():
        everything = torch.where(k > 0, k, x.shape[1]).clamp(max=x.shape[1])
        cutoff = torch.maximum(cutoff, _bisect(x, None, everything, top))
    if not flags.top_p.any():
        return cutoff, False
    mass = _mass(x, top, cutoff)
    need = _needed(mass.sum(1, keepdim=True), p)
    if x.device.type == "cpu":
        reached = _reach_on_cpu(x, mass, need, top, cutoff, p)
    else:
        reached = _bisect(x, mass, need, top)
    return torch.maximum(cutoff, torch.where(p < 1, reached, cutoff)), _one_is_enough(need, p)


def _reach_on_cpu(x: Tensor, mass: Tensor, need: Tensor, top: Tensor, cutoff: Tensor, p: Tensor) -> Tensor:
    """The same as the bisection; asking whether a few candidates are enough costs no wait on the CPU."""
    best = largest(x, min(_TRY, x.shape[1]))
    reached, found = _reach(best, _mass(best, top, cutoff), need)
    return reached if bool((found | (p >= 1)).all()) else _by_digits(x, mass, need)


def _by_digits(x: Tensor, mass: Tensor, need: Tensor) -> Tensor:
    """As `_bisect` with masses of which there are enough, by two digits of 16 bits in place of 32 halvings:
    weigh the tokens by their first digit, then those that have the one where it is reached by the second.
    Additions into a table in any order are quick on a CPU only."""
    number = _ordered(x.contiguous().view(torch.int32).long()) + (1 << 31)  # from 0, in the order of x
    first, missing = _digit(number >> 16, mass, need)
    second, _ = _digit(number & 0xFFFF, torch.where(number >> 16 == first, mass, 0), missing)
    found = ((first << 16) + second - (1 << 31)).clamp_(min=_MINUS_INF)  # where nothing has a mass
    return _ordered(found).to(torch.int32).view(torch.float32)


def _digit(digit: Tensor, mass: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """The largest digit [rows, 1] from which on tokens weigh at least `need`, and what larger ones leave of it."""
    weight = torch.zeros(len(digit), 1 << 16, dtype=torch.int64).scatter_add_(1, digit, mass)
    down = weight.flip(1).cumsum(1)  # of the digits from the largest on
    at = (down < need).sum(1, keepdim=True).clamp_(max=(1 << 16) - 1)
    above = down.gather(1, at) - weight.flip(1).gather(1, at)
    return (1 << 16) - 1 - at, need - above


def _ordered(bits: Tensor) -> Tensor:
    """Between float32 bits and integers of the same order, both int64; its own inverse."""
    return torch.where(bits >= 0, bits, bits ^ _SIGN_FREE)


def _bisect(x: Tensor, mass: Tensor | None, need: Tensor, top: Tensor) -> Tensor:
    """The largest float32 t such that the tokens with x >= t weigh at least `need` (None: one each)."""
    low = _ordered(torch.full_like(top, float("-inf")).view(torch.int32).long())  # always enough
    high = _ordered(top.view(torch.int32).long()) + 1  # never enough
    for _ in range(32):
        middle = (low + high) >> 1
        keep = x >= _ordered(middle).to(torch.int32).view(torch.float32)
        weight = (keep if mass is None else torch.where(keep, mass, 0)).sum(1, keepdim=True)
        enough = weight >= need
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return _ordered(low).to(torch.int32).view(torch.float32)
