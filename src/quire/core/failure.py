"""Why a request ends without a token: what its row's sentinel (types/plan.py) or its pooled vector says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.types import NO_TOKEN, NOT_FINITE, Request


@dataclass(frozen=True, slots=True)
class Failure:
    """`is_numeric`: the model's numbers are not finite, which is no fault of the request."""

    message: str
    is_numeric: bool


def find_failure(request: Request, token: int, pooled: np.ndarray | None) -> Failure | None:
    """Return why the request cannot go on with `token` and its `pooled` vector, or None if it can."""
    if token == NO_TOKEN:
        return Failure(
            f"no token can be sampled at position {request.known}: every token is excluded; check "
            "allowed_token_ids, bad_words, min_tokens and the structured output",
            False,
        )
    if token == NOT_FINITE or (pooled is not None and not np.isfinite(pooled).all()):
        return Failure(
            f"the model's output at position {request.known} is not finite (NaN or infinity), so the request was "
            "ended; its weights may be damaged, or overflow in this dtype: bfloat16 and float32 have more range "
            "than float16",
            True,
        )
    return None
