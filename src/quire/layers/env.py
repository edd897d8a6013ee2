"""`Env`: the shared inputs of layer construction. Layers read it in their constructors only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from quire.attention.base import AttentionBackend
from quire.kernels import Kernels
from quire.layers.written_out import LayerParts
from quire.parallel.experts import ALL_EXPERTS, ExpertShard
from quire.parallel.ranks import Parallel
from quire.parallel.stage import WHOLE, Stage
from quire.quant.spec import QuantSpec

# Takes consecutive rows of a tensor, [n, columns], and the number of rows before them.
RowSink = Callable[[torch.Tensor, int], None]


@dataclass(frozen=True, slots=True)
class StoredShape:
    """Dtype and shape of a tensor in the checkpoint; of GGUF blocks, the bytes of their rows and their `kind`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str = ""  # a key of KINDS in quant/formats/gguf.py


class Weights(Protocol):
    """A source of tensors by name (see models/checkpoint/checkpoint.py)."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor `name`."""
        ...

    def stored(self, name: str) -> StoredShape | None:
        """Return how the tensor `name` is stored; None if there is none, or if its numbers are made when read."""
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
            ModelError: if the tensor is missing, has another shape, or does not hold plain numbers; names it.
        """
        ...

    def packed(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), cols: slice = slice(None)
    ) -> torch.Tensor:
        """Return the part [rows, cols] of a tensor of any dtype, as `tensor` does: codes, scales, indices."""
        ...

    def stream(
        self,
        sink: RowSink,
        name: str,
        shape: tuple[int, ...],
        rows: slice = slice(None),
        cols: slice = slice(None),
        *,
        multiple: int = 1,
    ) -> None:
        """Pass the part [rows, cols] of a tensor of any dtype to `sink`, on the model's device.

        On a GPU background threads call `sink`, once for each piece of the part, until the checkpoint is finished. A
        sink may write only to memory that no other sink writes. Every piece but the last has a multiple of `multiple`
        rows. On a CPU `sink` is called once, before this function returns.
        """
        ...

    def when_loaded(self, action: Callable[[], None]) -> None:
        """Run `action` when all tensors that have been asked for are in place: on a CPU at once."""
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


def unobserved(names: tuple[str, ...], product: Any) -> Any:
    """Return the product as it is."""
    return product


@dataclass(frozen=True, slots=True)
class Env:
    """The weights, the ranks, and the implementations that layers are built with."""

    weights: Weights
    parallel: Parallel
    attention: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels | None = None  # None: plain PyTorch
    quantization: QuantSpec | None = None  # None: plain numbers, used as they are
    stage: Stage = WHOLE  # which layers to build
    experts: ExpertShard = ALL_EXPERTS  # which experts of a layer to load
    # Takes the names of a fused weight's tensors and their product, and returns the product to use: for calibration.
    observe: Callable[[tuple[str, ...], Any], Any] = unobserved
    parts: LayerParts = LayerParts()  # which implementation norms and MLPs use

    @property
    def norm_kernels(self) -> Kernels | None:
        """Return the kernels of norms; None: plain PyTorch."""
        return self.kernels if self.parts.norm == "auto" else None

    def for_mlp(self) -> Env:
        """Return the inputs of an MLP, with its kernels."""
        return self if self.parts.mlp == "auto" else replace(self, kernels=None)

    def expert_cut(self, width: int) -> slice:
        """Return the part of each held expert's intermediate dimension of `width`."""
        return self.parallel.cut(width) if self.experts.exchange is None else slice(0, width)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype of activations and KV entries, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")
