"""min_p, top_k and top_p as one number per row: the cutoff, the smallest logit that may be drawn.

A row keeps the tokens with `x >= cutoff`. Tokens of equal logit are kept or dropped together, so the result does
not depend on the order of a sort. There is one exception: if a single token of the largest logit has the mass that
top_p asks for, the first such token is chosen, so a tiny top_p is greedy. min_p is applied first, then top_k, then
top_p to the remaining tokens.

With a small top_k, the k largest values (`topk`) determine the cutoff. Otherwise it is found by bisection over the
bits of float32 as integers, which have the order of the floats: 32 halvings are exact (on a CPU, two digits of 16
bits). No path sorts the vocabulary.

Probability mass is counted in integer units of 2^-40 of the top token's mass. Sums are therefore exact in any
order, and a row's cutoff does not depend on the other rows.

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

MAX_CANDIDATES = 1024  # up to this top_k, `topk` finds the cutoff
_FIRST_CANDIDATES = 256  # the number that a CPU tries before it searches all tokens
_UNIT = 2.0**40
_SIGN_FREE = (1 << 31) - 1
_MINUS_INF = -0x7F800001  # -inf as an ordered integer
_LOWEST = torch.finfo(torch.float32).min


@dataclass(slots=True)
class FilterFlags:
    """Host copies of the values that determine the filters of a step, one entry per slot or per row."""

    top_k: np.ndarray  # int64, 0: off
    top_p: np.ndarray  # bool
    min_p: np.ndarray  # bool

    @classmethod
    def empty(cls, num_slots: int) -> FilterFlags:
        """Create the flags of `num_slots` slots without filters."""
        return cls(
            np.zeros(num_slots, np.int64), np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.bool_)
        )

    def at(self, index: np.ndarray) -> FilterFlags:
        """Select the flags of the slots or rows `index`."""
        return FilterFlags(self.top_k[index], self.top_p[index], self.min_p[index])

    @property
    def used(self) -> np.ndarray:
        """Return, for each entry, whether any filter is on, bool."""
        return (self.top_k > 0) | self.top_p | self.min_p

    @property
    def any(self) -> bool:
        """Return whether any entry has a filter."""
        return bool(self.top_k.any() or self.top_p.any() or self.min_p.any())


@dataclass(slots=True)
class RowCutoffs:
    """The tokens that the filters leave in each row."""

    cutoff: Tensor  # float32 [rows, 1]: tokens below it are dropped
    greedy: Tensor  # bool [rows]: only the first token with the largest logit is kept


def find_cutoffs(x: Tensor, flags: FilterFlags, columns: RowColumns) -> RowCutoffs:
    """Compute the cutoffs of `x` float32 [rows, vocab], which holds no NaN and no +inf.

    Args:
        x: logits divided by the temperature.
        flags: which rows use which filter, on the host.
        columns: the values of the filters, on the device.
    """
    top = x.amax(1, keepdim=True).clamp_(min=_LOWEST)  # finite even if all tokens are masked
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
    return RowCutoffs(cutoff, greedy)


def _mass(x: Tensor, top: Tensor, cutoff: Tensor) -> Tensor:
    """Return the unnormalised probability of the kept tokens, int64 in units of 2^-40 of the top token's."""
    return (x - top).exp_().mul_(_UNIT).masked_fill_(x < cutoff, 0).to(torch.int64)


def _needed(total: Tensor, p: Tensor) -> Tensor:
    """Return the mass that top_p asks for, less a part in 10^6, which is about the rounding of float32 logits."""
    return (total * (p - 1e-6)).ceil_().to(torch.int64).clamp_(min=1)


def _one_is_enough(need: Tensor, p: Tensor) -> Tensor:
    """Return whether one token of the largest logit has the mass `need` that top_p asks for, bool [rows]."""
    return ((p < 1) & (need <= int(_UNIT))).squeeze(1)


def _by_candidates(
    x: Tensor, top: Tensor, cutoff: Tensor, k: Tensor, p: Tensor, most: int, with_p: bool
) -> tuple[Tensor, Tensor | bool]:
    """Find the cutoffs of rows with 0 < k <= most, where `most` is the largest k among them."""
    most = min(most, x.shape[1])
    best = largest(x, most)  # [rows, most], descending
    cutoff = torch.maximum(cutoff, best.gather(1, k.clamp(max=most) - 1))
    if not with_p:
        return cutoff, False
    mass = _mass(best, top, cutoff)
    # Tokens that equal the k-th best are kept too, even if there are more of them than candidates.
    ties = (x == cutoff).sum(1, keepdim=True) - (best == cutoff).sum(1, keepdim=True)
    total = mass.sum(1, keepdim=True) + ties * _mass(cutoff, top, cutoff)
    need = _needed(total, p)
    reached, _ = _reach(best, mass, need)
    return torch.maximum(cutoff, torch.where(p < 1, reached, cutoff)), _one_is_enough(need, p)


def _reach(best: Tensor, mass: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidate whose cumulated mass reaches `need` (else the last one), and whether one does."""
    short = (mass.cumsum(1) < need).sum(1, keepdim=True)
    return best.gather(1, short.clamp(max=best.shape[1] - 1)), short < best.shape[1]


def _by_search(
    x: Tensor, top: Tensor, cutoff: Tensor, k: Tensor, p: Tensor, flags: FilterFlags
) -> tuple[Tensor, Tensor | bool]:
    """Find the cutoffs of rows with top_p alone, or with a top_k above `MAX_CANDIDATES`."""
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
    """Compute the same as `_bisect`, from a few candidates if they suffice; testing that is free on a CPU."""
    best = largest(x, min(_FIRST_CANDIDATES, x.shape[1]))
    reached, is_reached = _reach(best, _mass(best, top, cutoff), need)
    return reached if bool((is_reached | (p >= 1)).all()) else _by_digits(x, mass, need)


def _by_digits(x: Tensor, mass: Tensor, need: Tensor) -> Tensor:
    """Compute the same as `_bisect` for masses that reach `need`, with two digits of 16 bits.

    The first pass adds up the masses by the first digit and finds the digit at which they reach `need`. The second
    pass does the same with the second digit of the tokens that have this first one. Scattered additions into a
    table are fast on a CPU only.
    """
    number = _ordered(x.contiguous().view(torch.int32).long()) + (1 << 31)  # at least 0, in the order of x
    first, missing = _digit(number >> 16, mass, need)
    second, _ = _digit(number & 0xFFFF, torch.where(number >> 16 == first, mass, 0), missing)
    cutoff = ((first << 16) + second - (1 << 31)).clamp_(min=_MINUS_INF)  # for rows without any mass
    return _ordered(cutoff).to(torch.int32).view(torch.float32)


def _digit(digit: Tensor, mass: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest digit d such that tokens with digits >= d have at least the mass `need`.

    Returns:
        The digit, int64 [rows, 1], and the part of `need` that larger digits do not cover.
    """
    weight = torch.zeros(len(digit), 1 << 16, dtype=torch.int64).scatter_add_(1, digit, mass)
    down = weight.flip(1).cumsum(1)  # mass from the largest digit downwards
    at = (down < need).sum(1, keepdim=True).clamp_(max=(1 << 16) - 1)
    above = down.gather(1, at) - weight.flip(1).gather(1, at)
    return (1 << 16) - 1 - at, need - above


def _ordered(bits: Tensor) -> Tensor:
    """Map float32 bits to integers of the same order, both int64. The function is its own inverse."""
    return torch.where(bits >= 0, bits, bits ^ _SIGN_FREE)


def _bisect(x: Tensor, mass: Tensor | None, need: Tensor, top: Tensor) -> Tensor:
    """Find the largest float32 t such that the tokens with x >= t have at least the mass `need`.

    With `mass` None each token counts as 1.
    """
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
