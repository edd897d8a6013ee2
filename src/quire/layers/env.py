"""`Env`: what every layer is built from. Passed down once, at construction; nothing reads it later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.attention.base import AttentionBackend
from quire.kernels import Kernels
from quire.parallel.ranks import Parallel


class Weights(Protocol):
    """A checkpoint from which layers pull their own tensors (see models/checkpoint/checkpoint.py)."""

    def has(self, name: str) -> bool: ...

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), cols: slice = slice(None)
    ) -> torch.Tensor:
        """The tensor `name`, whose full shape must be `shape`, cut to [rows, cols]: on the CPU, in the
        checkpoint's dtype. Raises ModelError that names a missing or mis-shaped tensor."""
        ...

    def copy_into(
        self,
        destination: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        rows: slice = slice(None),
        cols: slice = slice(None),
    ) -> None:
        """`destination.copy_(tensor(...))`; the destination may be any view of the model's device and dtype.

        On a GPU the copy may be under way until the checkpoint is finished. So this is for large weights
        that nothing computes with while the model is built; what is needed at once comes from `tensor`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Env:
    weights: Weights
    parallel: Parallel
    attention: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels | None = None  # None: plain torch
