"""The two ends of a model: the token embedding, and the head that computes the logits."""

from __future__ import annotations

import torch

from quire.kernels import lookup
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.quant.base import Matmul, Part, make_matmul
from quire.quant.loading import load_product, open_packed


class Embedding:
    """A table of vectors, looked up by id and multiplied by `scale`, if there is one (Gemma)."""

    def __init__(self, env: Env, name: str, rows: int, width: int, scale: float | None = None) -> None:
        self.part = Part(name + ".weight", (rows, width), slice(None), slice(None))
        # Copied, because a memory-mapped table would be read again from its file whenever memory is short.
        self.weight = torch.empty(rows, width, device=env.device, dtype=env.dtype)
        self.part.copy_into(self.weight, env)
        # Rounded to the model's dtype, as in training.
        self.scale = None if scale is None else torch.tensor(scale, dtype=env.dtype).item()
        self.lookup = env.kernels.lookup if env.kernels else lookup

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [tokens, width] of `ids`, int64 [tokens]."""
        return self.lookup(self.weight, ids, self.scale)


class LMHead:
    """The final linear layer. `tied` shares the embedding's table; a `soft_cap` c maps a logit s to c tanh(s / c)."""

    def __init__(
        self,
        env: Env,
        name: str,
        width: int,
        vocab: int,
        tied: Embedding | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self.vocab = vocab
        self.soft_cap = soft_cap
        self.multiply: Matmul = _tied_product(env, tied) if tied else Linear(env, name, width, vocab)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] of hidden states [n, width]."""
        if not hidden.shape[0]:
            return hidden.new_empty(0, self.vocab)
        logits = self.multiply(hidden)
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


def _tied_product(env: Env, table: Embedding) -> Matmul:
    """Return the product with an embedding's table, or with its quantised numbers if there are any."""
    if open_packed(env, table.part) is None:
        return make_matmul(table.weight, None, env.kernels)
    return load_product(env, [table.part], None)
