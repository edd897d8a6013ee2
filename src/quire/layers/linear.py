"""`Linear`: y = x W^T + b, with W loaded from the checkpoint as one fused matrix.

Several checkpoint tensors (q, k, v; gate, up) become one weight and one product. `cut` shards it over the
tensor-parallel ranks: "rows" gives each rank a part of every output, "cols" a part of the inputs. Partial products
of "cols" are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from quire.layers.env import Env
from quire.quant.base import Part
from quire.quant.loading import ConcatenatedMatmul, load_product

Cut = Literal["rows", "cols"] | None


class Linear:
    """A linear layer over one or several checkpoint tensors, whose outputs are concatenated."""

    def __init__(
        self,
        env: Env,
        names: str | list[str],
        in_features: int,
        out_features: int | list[int],
        bias: bool = False,
        cut: Cut = None,
        transposed: bool = False,
        units: list[int] | None = None,
    ) -> None:
        """Load the weight.

        Args:
            env: the weights, and the ranks to shard over.
            names: tensor names without `.weight` or `.bias`.
            in_features: number of inputs before sharding.
            out_features: number of outputs of each name. One name with several numbers is one tensor that holds
                them all in that order.
            bias: whether there are bias tensors.
            cut: how to shard; None: every rank has the whole.
            transposed: whether the checkpoint stores [inputs, outputs].
            units: with the cut "rows", number of parts of each output that must stay whole, such as heads.
        """
        names = [names] if isinstance(names, str) else names
        outs = [out_features] if isinstance(out_features, int) else out_features
        parallel = env.parallel
        cols = parallel.cut(in_features) if cut == "cols" else slice(0, in_features)
        parts: list[Part] = []
        offset = 0
        for i, out in enumerate(outs):
            rows = parallel.cut(out, units[i] if units else None) if cut == "rows" else slice(0, out)
            if len(names) == 1:
                shape = (sum(outs), in_features)
                parts.append(
                    Part(
                        names[0] + ".weight",
                        shape,
                        slice(offset + rows.start, offset + rows.stop),
                        cols,
                        transposed,
                    )
                )
                offset += out
            else:
                parts.append(Part(names[i] + ".weight", (out, in_features), rows, cols, transposed))
        self.in_features = cols.stop - cols.start
        self.out_features = sum(part.num_rows for part in parts)
        self.needs_reduce = cut == "cols" and parallel.size > 1
        self.parallel = parallel
        vector = _load_bias(env, parts) if bias else None
        if cut == "cols" and parallel.rank > 0:
            vector = None  # ranks sum their partial results, so only the first one adds the bias
        self.multiply = load_product(env, parts, vector)

    @classmethod
    def from_parts(cls, env: Env, parts: list[Part]) -> Linear:
        """Load a weight whose rows are those of `parts`, in any order; a rank gives only its own."""
        linear = cls.__new__(cls)
        linear.in_features = parts[0].num_cols
        linear.out_features = sum(part.num_rows for part in parts)
        linear.needs_reduce, linear.parallel = False, env.parallel
        linear.multiply = load_product(env, parts, None)
        return linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out_features] for x [tokens, in_features]."""
        y = self.multiply(x)
        return self.parallel.all_reduce(y) if self.needs_reduce else y

    def split(self, x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        """Return the outputs as consecutive tensors [tokens, size].

        Outputs of different formats are not joined first, so rows of the tensors may have different strides.
        """
        if isinstance(self.multiply, ConcatenatedMatmul) and not self.needs_reduce:
            return self.multiply.split(x, sizes)
        return self(x).split(sizes, 1)


def _load_bias(env: Env, parts: list[Part]) -> torch.Tensor:
    bias = torch.empty(sum(part.num_rows for part in parts), device=env.device, dtype=env.dtype)
    start = 0
    for part in parts:
        name = part.name.removesuffix(".weight") + ".bias"
        bias[start : start + part.num_rows].copy_(env.weights.tensor(name, part.shape[:1], part.rows))
        start += part.num_rows
    return bias
