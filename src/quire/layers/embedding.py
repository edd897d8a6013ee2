"""The two ends of a model: token embeddings, and the head that scores every token of the vocabulary."""

from __future__ import annotations

import torch

from quire.kernels import lookup
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.quant.base import Matmul, make_matmul


class Embedding:
    """A table of vectors, looked up by id; `scale` multiplies what is looked up (Gemma)."""

    def __init__(self, env: Env, name: str, rows: int, width: int, scale: float | None = None) -> None:
        # a copy: a memory-mapped table would be read from the file again whenever memory is short
        self.weight = torch.empty(rows, width, device=env.device, dtype=env.dtype)
        env.weights.copy_into(self.weight, name + ".weight", (rows, width))
        # rounded to the model's dtype, as in training
        self.scale = None if scale is None else torch.tensor(scale, dtype=env.dtype).item()
        self.lookup = env.kernels.lookup if env.kernels else lookup

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lookup(self.weight, ids, self.scale)  # [tokens, width]


class LMHead:
    """hidden [n, width] -> logits [n, vocab]; `tied` shares the table of the embedding.

    `soft_cap` c maps a score s to c tanh(s / c).
    """

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
        self.multiply: Matmul = (
            make_matmul(tied.weight, None, env.kernels) if tied else Linear(env, name, width, vocab)
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.shape[0]:
            return hidden.new_empty(0, self.vocab)
        logits = self.multiply(hidden)
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap
