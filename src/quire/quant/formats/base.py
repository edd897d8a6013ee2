"""What readers of weight formats share: look-ups of a part's tensors, cuts along blocks, checks of scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.layers.env import Env, StoredShape
from quire.quant.base import Part
from quire.quant.forms import QuantisedWeight
from quire.quant.layouts import FormLayout
from quire.types import ModelError

_WHOLE = slice(None)


class PackedPart(Protocol):
    """A part of a quantised weight, as the checkpoint stores it."""

    @property
    def layout(self) -> FormLayout: ...

    def fill(self, weight: QuantisedWeight) -> None:
        """Load the part into `weight`, which has `layout` and the part's rows. A GPU's copies end with the checkpoint."""
        ...


# Returns the part, or None if the checkpoint does not store it in the format.
FormatReader = Callable[[Env, Part], PackedPart | None]


class PartTensors:
    """The tensors that store one part. Their names begin with the name of the part's layer, `module`."""

    def __init__(self, env: Env, part: Part) -> None:
        self.weights, self.device, self.part, self.spec = env.weights, env.device, part, env.quantization
        self.module = part.name.removesuffix(".weight")
        self.rows = slice(*part.rows.indices(part.shape[0])[:2])
        self.cols = slice(*part.cols.indices(part.shape[1])[:2])

    def name(self, suffix: str) -> str:
        return f"{self.module}.{suffix}"

    def stored(self, suffix: str) -> StoredShape | None:
        return self.weights.stored(self.name(suffix))

    def require(self, suffix: str) -> StoredShape:
        """Return how a tensor is stored, or raise ModelError if there is none."""
        if (found := self.stored(suffix)) is None:
            raise ModelError(f"tensor {self.part.name} is quantised, but {self.name(suffix)} is missing")
        return found

    def read(self, suffix: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a whole tensor on the CPU. Its shape must be `shape`, if that is given."""
        return self.weights.packed(self.name(suffix), shape or self.require(suffix).shape)

    def skip(self, *suffixes: str) -> None:
        """Read tensors that the product does not need, so that they do not count as unused."""
        for suffix in suffixes:
            if self.stored(suffix):
                self.read(suffix)

    def scales(self, suffix: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a tensor of scales on the CPU, in its dtype, after checking that they are finite.

        Raises:
            ModelError: if a scale is NaN or infinite.
        """
        values = self.read(suffix, shape)
        if values.is_floating_point() and not bool(values.float().isfinite().all()):
            raise ModelError(f"tensor {self.name(suffix)} holds a scale that is not finite")
        return values

    def refuse(self, text: str) -> ModelError:
        """Build the error for a part that cannot be read."""
        return ModelError(f"tensor {self.part.name} {text}")

    def in_blocks(self, cut: slice, length: int, block: int, unit: str) -> slice:
        """Return a cut of `length` rows or columns in units of blocks.

        Raises:
            ModelError: if the cut does not go along the blocks.
        """
        if cut.start % block or (cut.stop % block and cut.stop != length):
            raise self.refuse(
                f"cannot be cut at {unit} {cut.start}:{cut.stop} of {length}: its blocks have {block} {unit}; use "
                "fewer ranks"
            )
        return slice(cut.start // block, -(-cut.stop // block))

    def groups(self, group: int) -> tuple[slice, int]:
        """Return this rank's groups of columns, and its columns in each of them.

        Raises:
            ModelError: if the columns are cut within a group.
        """
        cols, inputs = self.cols, self.part.shape[1]
        width = cols.stop - cols.start
        if width < group and cols.start // group == (cols.stop - 1) // group:  # inside one group
            return slice(cols.start // group, cols.start // group + 1), width
        return self.in_blocks(cols, inputs, group, "columns"), group

    def copy(
        self,
        destination: torch.Tensor,
        suffix: str,
        rows: slice,
        cols: slice,
        view: torch.dtype | None = None,
    ) -> None:
        """Copy a part of a tensor into `destination`; `view` is the dtype as which its bytes are taken."""
        stored = self.require(suffix)

        def sink(values: torch.Tensor, first: int) -> None:
            values = values.contiguous() if view is None else values.contiguous().view(view)
            destination[first : first + values.shape[0]].copy_(values)

        self.weights.stream(sink, self.name(suffix), stored.shape, rows, cols)
