"""The scalar sampling options that the last stage of sampling reads, one declaration each.

A declaration names the field of `SamplingParams`, its column on the device, and how a request's value is
written there. `check_claims` holds these and the logits processors against the list of fields that belong to
the sampler, so a field that nothing reads cannot be added unnoticed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.types import EngineRequest
from quire.types.sampling_params import FIELD_OWNERS

GREEDY_TEMPERATURE = 0.0


@dataclass(frozen=True, slots=True)
class SlotColumn:
    """One column of the slot table: its name, the field it comes from, and its value for a request."""

    name: str
    field: str
    value: Callable[[EngineRequest], int | float]


def is_greedy(request: EngineRequest) -> bool:
    """Return whether a request takes the most likely token of every step."""
    # top_k keeps all of several equal logits, so a top_k of 1 would draw among the best ones.
    return request.params.greedy or request.params.top_k == 1


def _temperature(request: EngineRequest) -> float:
    return GREEDY_TEMPERATURE if is_greedy(request) else float(request.params.temperature)


def _top_k(request: EngineRequest) -> int:
    return max(0, request.params.top_k)


def _top_p(request: EngineRequest) -> float:
    return float(request.params.top_p)


def _log_min_p(request: EngineRequest) -> float:
    return math.log(request.params.min_p) if request.params.min_p > 0 else -math.inf


def _seed_low(request: EngineRequest) -> int:
    """Return the low 32 bits of the seed as a signed number."""
    return ((request.seed + 2**31) & 0xFFFFFFFF) - 2**31


def _seed_high(request: EngineRequest) -> int:
    """Return the high 32 bits of the seed as a signed number."""
    return request.seed >> 32


# The kernels of kernels/sampling read the columns in this order.
SLOT_COLUMNS = (
    SlotColumn("temperature", "temperature", _temperature),
    SlotColumn("top_k", "top_k", _top_k),
    SlotColumn("top_p", "top_p", _top_p),
    SlotColumn("log_min_p", "min_p", _log_min_p),
    SlotColumn("seed_low", "seed", _seed_low),
    SlotColumn("seed_high", "seed", _seed_high),
)
COLUMN_NAMES = tuple(column.name for column in SLOT_COLUMNS)
COLUMN_FIELDS = tuple(dict.fromkeys(column.field for column in SLOT_COLUMNS))


def check_claims(claims: Iterable[str]) -> None:
    """Raise TypeError unless `claims` names every field that belongs to the sampler exactly once."""
    count = Counter(claims)
    owned = set(FIELD_OWNERS["sampler"])
    wrong = sorted(owned - count.keys()) + sorted(
        name for name, n in count.items() if n > 1 or name not in owned
    )
    if wrong:
        raise TypeError(
            f"sampling parameters {', '.join(wrong)} must be read by exactly one slot column or logits processor, "
            "and be listed under 'sampler' in quire.types.sampling_params.FIELD_OWNERS"
        )
