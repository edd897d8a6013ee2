"""The only factory of products: from the parts of a fused weight to its `Matmul`, in the format that each part has.

The checkpoint decides: each part is asked for by every format's reader, and is plain if none knows it. Neighbouring
parts with equal layouts become one weight and one product; products of others are concatenated, unless the layer takes
its outputs apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from quire.layers.env import Env
from quire.quant.base import FusingMatmul, Matmul, Part, make_matmul
from quire.quant.formats.base import FormatReader, PackedPart
from quire.quant.formats.convert import convert_plain
from quire.quant.formats.fp4 import read_fp4
from quire.quant.formats.fp8 import read_fp8
from quire.quant.formats.gguf import read_gguf
from quire.quant.formats.groups import read_groups
from quire.quant.formats.int8 import read_int8
from quire.quant.forms import QuantisedWeight
from quire.quant.layouts import FormLayout, merge
from quire.quant.products import quantised_product
from quire.types import ModelError

# In this order: the last one takes every weight, if a conversion is asked for.
FORMATS: tuple[FormatReader, ...] = (
    read_gguf,
    read_fp8,
    read_int8,
    read_groups,
    read_fp4,
    convert_plain,
)
# A part, and how the checkpoint stores it; None: as plain numbers.
OpenedPart = tuple[Part, PackedPart | None]


def load_product(env: Env, parts: list[Part], bias: torch.Tensor | None) -> Matmul:
    """Load the parts of a fused weight, and return the product with all of them.

    Args:
        env: the weights, and the kernels to choose from.
        parts: consecutive rows of the weight.
        bias: [rows of all parts], or None.

    Raises:
        ModelError: if a part is missing, damaged, or in a format that is not supported.
    """
    products: list[Matmul] = []
    first = 0
    for run in fused_runs([(part, open_packed(env, part)) for part in parts]):
        rows = sum(part.num_rows for part, _ in run)
        part_bias = None if bias is None else bias[first : first + rows]
        if run[0][1] is None:
            products.append(make_matmul(load_plain(env, [part for part, _ in run]), part_bias, env.kernels))
        else:
            products.append(quantised_product(env, _load_packed(env, run), part_bias))
        first += rows
    product = products[0] if len(products) == 1 else ConcatenatedMatmul(products)
    return env.observe(tuple(part.name for part in parts), product)  # type: ignore[no-any-return]


def open_packed(env: Env, part: Part, formats: Sequence[FormatReader] = FORMATS) -> PackedPart | None:
    """Return the part in the first of `formats` that it is stored in; None if its numbers are plain."""
    return next((found for read in formats if (found := read(env, part)) is not None), None)


def load_plain(env: Env, parts: Sequence[Part]) -> torch.Tensor:
    """Load plain parts into one weight [rows of all parts, inputs] of the model's dtype."""
    rows = sum(part.num_rows for part in parts)
    weight = torch.empty(rows, parts[0].num_cols, device=env.device, dtype=env.dtype)
    for part, first in zip(parts, _starts(parts)):
        part.copy_into(weight[first : first + part.num_rows], env)
    return weight


def load_dequantised(env: Env, part: Part) -> torch.Tensor:
    """Load a part in the model's dtype, whatever format the checkpoint stores; no conversion is applied.

    The numbers are in place when the checkpoint is finished.
    """
    packed = open_packed(env, part, FORMATS[:-1])
    if packed is None:
        return load_plain(env, [part])
    weight = _load_packed(env, [(part, packed)])
    plain = torch.empty(weight.shape, device=env.device, dtype=env.dtype)

    def fill() -> None:
        plain.copy_(weight.dequantised(env.dtype))

    env.weights.when_loaded(fill)
    return plain


def stacks(env: Env, experts: Sequence[list[Part]]) -> bool:
    """Return whether `load_stack` takes these matrices: all are stored alike, and no cut divides a block."""
    try:
        _stack_layout([(part, open_packed(env, part)) for parts in experts for part in parts])
    except ModelError:
        return False
    return True


def load_stack(env: Env, experts: Sequence[list[Part]]) -> torch.Tensor | QuantisedWeight:
    """Load the matrices of experts, each of several parts, into one stack [experts, rows of all parts, inputs].

    Raises:
        ModelError: if the experts are not all stored alike.
    """
    opened = [[(part, open_packed(env, part)) for part in parts] for parts in experts]
    layout = _stack_layout([pair for run in opened for pair in run])
    rows, cols = sum(part.num_rows for part in experts[0]), experts[0][0].num_cols
    if layout is None:
        stack = torch.empty(len(experts), rows, cols, device=env.device, dtype=env.dtype)
        for number, parts in enumerate(experts):
            for part, first in zip(parts, _starts(parts)):
                part.copy_into(stack[number, first : first + part.num_rows], env)
        return stack
    weight = layout.allocate((len(experts),), rows, cols, env.device)
    for number, run in enumerate(opened):
        _fill(weight.expert(number), run)
    return weight


def _stack_layout(opened: list[OpenedPart]) -> FormLayout | None:
    """Return the layout of a stack of experts; None if all parts are plain."""
    layout = opened[0][1].layout if opened[0][1] else None
    for part, packed in opened:
        merged = merge(layout, packed.layout, stacked=True) if layout and packed else None
        aligned = merged is None or part.num_rows % merged.row_step == 0 or part is opened[-1][0]
        if (merged is None and (layout or packed)) or not aligned:
            raise ModelError(
                f"{part.name} is not stored like the other experts of its layer, or has {part.num_rows} rows, which do "
                "not fill whole blocks; this is not supported"
            )
        layout = merged
    return layout


def fused_runs(opened: list[OpenedPart]) -> list[list[OpenedPart]]:
    """Split parts into runs that become one weight: layouts that agree, each part at a multiple of the row step."""
    runs: list[list[OpenedPart]] = []
    for pair in opened:
        if runs and _run_layout([*runs[-1], pair]):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs


def _run_layout(run: list[OpenedPart]) -> FormLayout | bool:
    """Return the common layout of parts; True if all are plain, False if they cannot be one weight."""
    if all(packed is None for _, packed in run):
        return True
    layout = run[0][1].layout if run[0][1] else None
    for (_, packed), first in zip(run, _starts([part for part, _ in run])):
        layout = merge(layout, packed.layout) if layout and packed else None
        if layout is None or first % layout.row_step:
            return False
    return layout or False


def _load_packed(env: Env, run: list[OpenedPart]) -> QuantisedWeight:
    layout = _run_layout(run)
    assert not isinstance(layout, bool)
    rows = sum(part.num_rows for part, _ in run)
    weight = layout.allocate((), rows, run[0][0].num_cols, env.device)
    _fill(weight, run)
    return weight


def _fill(weight: QuantisedWeight, run: list[OpenedPart]) -> None:
    """Load consecutive parts into a weight that has their rows."""
    for (part, packed), first in zip(run, _starts([part for part, _ in run])):
        assert packed is not None
        packed.fill(weight.rows(first, first + part.num_rows))


def _starts(parts: Sequence[Part]) -> list[int]:
    """Return the first row of each part in a weight that consists of all of them."""
    return [0, *accumulate(part.num_rows for part in parts)][:-1]


class ConcatenatedMatmul:
    """Products whose outputs follow one another: parts of a fused weight in different formats."""

    def __init__(self, products: list[Matmul]) -> None:
        self.products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(x) for product in self.products], -1)

    def split(self, x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the outputs as consecutive tensors of these widths. Only one that spans products is copied."""
        return _resized([product(x) for product in self.products], sizes)

    def rounding(self, rows: int) -> FusingMatmul | None:
        """Return the product that rounds so many rows per 128 columns, if there is one and no other does."""
        found = [each for each in self.products if isinstance(each, FusingMatmul) and each.scale_order(rows)]
        return found[0] if len(found) == 1 else None

    def split_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        sizes: Sequence[int],
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return `split` of norm(x + residual), whose number of rows has a product for `rounding`, and the sum."""
        rounding = self.rounding(x.shape[0])
        assert rounding is not None
        rounded, normed, total = rounding.norm_and_round(x, residual, norm, eps)
        outputs = [
            rounding.of_rounded(rounded) if product is rounding else product(normed)
            for product in self.products
        ]
        return _resized(outputs, sizes), total


def _resized(rest: list[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the columns of consecutive tensors as tensors of other widths, views where one tensor has them."""
    parts = []
    for size in sizes:
        pieces = []
        while size:
            piece, behind = rest[0][:, :size], rest[0][:, size:]
            size -= piece.shape[1]
            pieces.append(piece)
            rest[:1] = [behind] if behind.shape[1] else []
        parts.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1))
    return parts
