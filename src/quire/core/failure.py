"""The check that finds requests whose step brought no token."""

from __future__ import annotations

import numpy as np

from quire.types import NO_TOKEN, NOT_FINITE, Request, RequestFailure


def find_failure(request: Request, new: list[int], pooled: np.ndarray | None) -> RequestFailure | None:
    """Return the reason why a request must end, or None if it can continue.

    Args:
        request: the request, before the tokens are appended.
        new: its sampled tokens, of which the last may be one of the sentinels NO_TOKEN and NOT_FINITE.
        pooled: its pooled hidden states, float32 [hidden], or None.
    """
    token, position = new[-1], request.known + len(new) - 1
    if token == NO_TOKEN:
        return RequestFailure(
            f"no token can be sampled at position {position}: every token is excluded; check "
            "allowed_token_ids, bad_words, min_tokens and the structured output"
        )
    if token == NOT_FINITE or (pooled is not None and not np.isfinite(pooled).all()):
        return RequestFailure(
            f"the model's output at position {position} is not finite (NaN or infinity), so the request was "
            "ended; its weights may be damaged, or overflow in this dtype: bfloat16 and float32 have more range "
            "than float16",
            internal=True,
        )
    return None
