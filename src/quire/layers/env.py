"""`Env`: the shared inputs of layer construction. Layers read it in their constructors only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.attention.base import AttentionBackend
from quire.kernels import Kernels
from quire.parallel.ranks import Parallel


class Weights(Protocol):
    """A source of tensors by name (see models/checkpoint/checkpoint.py)."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor `name`."""
        ...

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), cols: slice = slice(None)
    ) -> torch.Tensor:
        """Return the part [rows, cols] of a tensor, on the CPU and in the checkpoint's dtype.

        Args:
            name: name of the tensor.
            shape: its full shape, which is checked.
            rows, cols: the part to return.

        Raises:
            ModelError: if the tensor is missing or has another shape; names it.
        """
        ...

    def copy_into(
        self,
        destination: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        rows: slice = slice(None),
        cols: slice = slice(None),
    ) -> None:
        """Copy `tensor(name, shape, rows, cols)` into `destination`, any view of the model's device and dtype.

        On a GPU the copy may run until the checkpoint is finished. So use this for large weights that are not
        needed while the model is built, and `tensor` for values that are needed at once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Env:
    """The weights, the ranks, and the implementations that layers are built with."""

    weights: Weights
    parallel: Parallel
    attention: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels | None = None  # None: plain PyTorch

    @property
    def dtype_name(self) -> str:
        """Name of the dtype of activations and KV entries, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")
