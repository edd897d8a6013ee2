"""Pooled hidden states as embeddings."""

from __future__ import annotations

import numpy as np


def embedding(pooled: bytes, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """float32 [dimensions] of the pooled states (float32 [hidden]): the first `dimensions` of them, of length 1
    if `normalize`. Raises ValueError if the model has fewer."""
    found = np.frombuffer(pooled, "<f4")
    if dimensions is not None:
        if dimensions > len(found):
            raise ValueError(f"dimensions must be at most {len(found)}, got {dimensions}")
        found = found[:dimensions]
    length = float(np.linalg.norm(found.astype(np.float64))) if normalize else 1.0
    return (found / (length or 1.0)).astype("<f4")
