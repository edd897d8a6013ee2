"""Gemma 4: norms of all heads, layers that share keys and values, per-layer embeddings, experts beside the MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.layers.expert_weights import load_experts
from quire.layers.gemma_router import GemmaRouter
from quire.layers.moe import MoE, make_experts
from quire.layers.residual import ResidualNorm, Stream
from quire.layers.rope import Rotation
from quire.models.decoder import DecoderModel
from quire.models.gemma_parts import GemmaAttention, LayerEmbeddingGate, LayerEmbeddings, narrowed
from quire.models.layouts import SandwichLayer
from quire.models.spec import ModelSpec


class Gemma4Experts:
    """The experts beside the MLP of a layer, with their own norms."""

    def __init__(self, env: Env, spec: ModelSpec, layer: SandwichLayer, prefix: str) -> None:
        moe = spec.moe
        assert moe is not None
        self.before = layer.make_norm(env, spec, prefix, "pre_feedforward_layernorm_2")
        self.after_mlp = layer.make_norm(env, spec, prefix, "post_feedforward_layernorm_1")
        self.after = layer.make_norm(env, spec, prefix, "post_feedforward_layernorm_2")
        sizes = moe.routing.num_experts, spec.hidden_size, moe.intermediate_size
        weights = load_experts(env, prefix + "experts.", *sizes)
        experts = make_experts(env, weights, spec.activation)
        self.moe = MoE(
            GemmaRouter(env, prefix + "router.", spec.hidden_size, moe.routing, spec.norm_eps),
            experts,
            env.parallel,
        )

    def __call__(self, mlp: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return the sum of the output of the MLP and of the experts, both normed; `total` is the stream."""
        mixed = self.moe.mix(self.before.alone(total), self.moe.router(total))
        return self.after_mlp.alone(mlp) + self.after.alone(mixed)


class Gemma4Layer(SandwichLayer):
    """A layer of Gemma 4. Its embedding of each token is set before each call."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        super().__init__(env, spec, index, prefix)
        assert spec.gemma is not None
        self.experts = Gemma4Experts(env, spec, self, prefix) if spec.moe else None
        self.gate = LayerEmbeddingGate(env, spec, prefix) if spec.gemma.layer_width else None
        name = prefix + "layer_scalar"
        self.scale = float(env.weights.tensor(name, (1,))) if env.weights.has(name) else 1.0

    def make_attention(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> GemmaAttention:
        """Build the attention half of layer `index`."""
        return GemmaAttention(env, spec, index, prefix, norm, adds)

    def run(
        self, stream: Stream, rotation: Rotation, batch: ForwardBatch, embedded: torch.Tensor | None
    ) -> Stream:
        """Run the layer; `embedded` is its embedding of each token, [tokens, width]."""
        x, residual = self.attn(*stream, rotation, batch)
        x, total = self.mlp(self.after_attn.alone(x), residual)
        assert total is not None
        if self.experts is not None:
            x = self.experts(x, total)
        total = total + self.after_mlp.alone(x)
        if self.gate is not None and embedded is not None:
            total = total + self.gate(total, narrowed(embedded, batch, self.attn.is_last))
        return total * self.scale, None


class Gemma4Model(DecoderModel):
    """Gemma 4, text part."""

    layer_class = Gemma4Layer
    layers: Sequence[Gemma4Layer]

    def __init__(self, env: Env, spec: ModelSpec) -> None:
        super().__init__(env, spec)
        assert spec.gemma is not None
        self.embeddings = LayerEmbeddings(env, spec, self.prefix) if spec.gemma.layer_width else None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        rotations = [rope.lookup(batch.positions) for rope in self.ropes]
        embedded = self.embed(batch.input_ids)
        by_layer: tuple[torch.Tensor | None, ...] = (None,) * len(self.layers)
        if self.embeddings is not None:
            by_layer = self.embeddings(batch.input_ids, embedded)
        stream: Stream = embedded, None
        for layer, rope, own in zip(self.layers, self.rope_of, by_layer):
            stream = layer.run(stream, rotations[rope], batch, own)
        return self.norm(*stream)[0]
