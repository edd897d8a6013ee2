"""The two ends of a model: the token embedding, and the head that computes the logits.

Both are sharded by token id over the ranks. Shards have equal lengths, so the last one may end with unused rows.
"""

from __future__ import annotations

import torch

from quire.kernels import lookup
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.quant.base import Matmul, Part, make_matmul
from quire.quant.loading import load_product, open_packed


class Embedding:
    """A table of vectors, looked up by id and multiplied by `scale`, if there is one."""

    def __init__(
        self,
        env: Env,
        name: str,
        rows: int,
        width: int,
        scale: float | None = None,
        rounds_scale: bool = False,
    ) -> None:
        """Load the table; `rounds_scale` if the scale is rounded to the model's dtype, as Gemma's training did."""
        # Copied, because a memory-mapped table would be read again from its file whenever memory is short.
        self.parallel = parallel = env.parallel
        part, held = parallel.padded_cut(rows)
        self.first, self.part = parallel.rank * part, part
        shape = (
            (part, width) if parallel.size == 1 else (part + 1, width)
        )  # the last row, of zeros, is for other ids
        self.table = torch.empty(shape, device=env.device, dtype=env.dtype)
        self.table[held.stop - held.start :].zero_()
        env.weights.copy_into(self.table[: held.stop - held.start], name + ".weight", (rows, width), held)
        self.weight = self.table[:part]
        self.stored = Part(name + ".weight", (rows, width), slice(None), slice(None))
        self.scale = torch.tensor(scale, dtype=env.dtype).item() if scale and rounds_scale else scale
        self.lookup = env.kernels.lookup if env.kernels else lookup

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [tokens, width] of `ids`, int64 [tokens]."""
        if self.parallel.size > 1:
            ids = (ids - self.first).clamp_(-1, self.part) % (
                self.part + 1
            )  # ids before the shard become -1, too
        return self.parallel.all_reduce(self.lookup(self.table, ids, self.scale))


class LMHead:
    """The final linear layer, whose results are multiplied by `scale`.

    `tied` shares the embedding's table; a `soft_cap` c maps a logit s to c tanh(s / c).
    """

    def __init__(
        self,
        env: Env,
        name: str,
        width: int,
        vocab: int,
        tied: Embedding | None = None,
        soft_cap: float | None = None,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        self.vocab = vocab
        self.soft_cap, self.scale = soft_cap, scale
        self.parallel = env.parallel
        # A head of its own is sharded only if the ranks get equal shards.
        self.gathers = env.parallel.size > 1 and (tied is not None or vocab % env.parallel.size == 0)
        self.multiply: Matmul = (
            _tied_product(env, tied)
            if tied
            else Linear(env, name, width, vocab, bias, cut="rows" if self.gathers else None)
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] of hidden states [n, width]."""
        if not hidden.shape[0]:
            return hidden.new_empty(0, self.vocab)
        logits = self.multiply(hidden)
        if self.gathers:
            logits = self.parallel.all_gather(logits)[:, : self.vocab].contiguous()
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


def _tied_product(env: Env, table: Embedding) -> Matmul:
    """Return the product with an embedding's table, or with its quantised numbers if one rank holds them all."""
    if env.parallel.size > 1 or open_packed(env, table.stored) is None:
        return make_matmul(table.weight, None, env.kernels)
    return load_product(env, [table.stored], None)
