"""MiniMax-01 (arXiv:2501.08313): lightning attention, and a residual stream of normed values.

Each half is y = norm(x), then x = a y + b half(y), with factors a and b of each kind of half.
"""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.layers.norm import PassThrough
from quire.layers.residual import Stream
from quire.layers.rope import Rotation
from quire.models.decoder import DecoderModel
from quire.models.hybrid import HybridLayer
from quire.models.spec import ModelSpec


class MiniMaxLayer(HybridLayer):
    """A layer whose residual stream is normed in front of each half."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        assert spec.residual_factors is not None
        factors = spec.residual_factors
        self.first, self.second = factors["mixer" if spec.mixes[index] else "attention"], factors["mlp"]
        self.norm = self.make_norm(env, spec, prefix, "input_layernorm")
        self.attn = self.make_attention(env, spec, index, prefix + "self_attn.", PassThrough(), adds=False)
        self.post_norm = self.make_norm(env, spec, prefix, "post_attention_layernorm")
        self.experts = self.make_mlp(env, spec, index, prefix)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        normed, _ = self.norm(x, residual)
        attended, kept = self.attn(normed, None, rotation, batch)
        assert kept is not None
        normed = self.post_norm.alone(kept * self.first[0] + attended * self.first[1])
        return normed * self.second[0] + self.experts(normed) * self.second[1], None


class MiniMaxModel(DecoderModel):
    """A MiniMax-01 model."""

    layer_class = MiniMaxLayer
