"""Embeddings from pooled hidden states."""

from __future__ import annotations

import numpy as np


def embedding(pooled: bytes, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """Turn pooled hidden states into an embedding.

    Args:
        pooled: the pooled hidden states, float32 [hidden], as little-endian bytes.
        dimensions: keep only the first `dimensions` values (Matryoshka embeddings, arXiv:2205.13147); None keeps all.
        normalize: scale the result to length 1 (L2 norm). A zero vector stays zero.

    Returns:
        float32 [dimensions], or float32 [hidden] if `dimensions` is None.

    Raises:
        ValueError: if the model has fewer than `dimensions` values.
    """
    values = np.frombuffer(pooled, "<f4")
    if dimensions is not None:
        if dimensions > len(values):
            raise ValueError(f"dimensions must be at most {len(values)}, got {dimensions}")
        values = values[:dimensions]
    length = float(np.linalg.norm(values.astype(np.float64))) if normalize else 1.0
    return (values / (length or 1.0)).astype("<f4")
