"""Gemma 3n: several residual streams (AltUp, arXiv:2301.13310), learned residuals (LAuReL, arXiv:2411.07501).

Layers compute one stream. Before a layer all streams are predicted from all, and behind it they are corrected by what
it computed. The streams are one tensor [streams, tokens, hidden].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.attention.base import ForwardBatch
from quire.layers.activation import ACTIVATIONS
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.norm import PassThrough, RMSNorm, load_vector
from quire.layers.rope import Rotation
from quire.models.decoder import DecoderModel
from quire.models.gemma_parts import GemmaAttention, LayerEmbeddingGate, LayerEmbeddings, narrowed
from quire.models.layouts import DecoderLayer
from quire.models.spec import ModelSpec


class AltUp:
    """The prediction and correction of the streams around a layer."""

    def __init__(self, env: Env, spec: ModelSpec, prefix: str) -> None:
        gemma, hidden = spec.gemma, spec.hidden_size
        assert gemma is not None
        self.count, self.active, self.scale = gemma.streams, gemma.active_stream, 1 / hidden
        self.norm = RMSNorm(env, prefix + "router_norm", hidden, spec.norm_eps)
        self.router = Linear(env, prefix + "modality_router", hidden, self.count)
        self.predictor = Linear(env, prefix + "prediction_coefs", self.count, self.count**2)
        self.corrector = Linear(env, prefix + "correction_coefs", self.count, self.count)
        self.output = load_vector(env, prefix + "correct_output_scale", hidden)
        self.scales = gemma.scales_correction

    def route(self, x: torch.Tensor) -> torch.Tensor:
        """Return what decides the coefficients, [tokens, streams], for the active stream x [tokens, hidden]."""
        # In fp64, because PyTorch's fp32 tanh of an element depends on its place in the tensor.
        return self.router(self.norm.alone(x) * self.scale).double().tanh().to(x.dtype)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the streams plus a sum of all streams, weighted by token."""
        weights = self.predictor(self.route(streams[self.active])).view(-1, self.count, self.count)
        return streams + torch.einsum("sth,tos->oth", streams, weights)

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return the streams corrected by the difference between the computed and the predicted active stream."""
        weights = self.corrector(self.route(computed)) + 1.0  # [tokens, streams]
        return predicted + (computed - predicted[self.active]) * weights.t().unsqueeze(-1)


class Laurel:
    """x + norm(x L^T R^T), with a low rank."""

    def __init__(self, env: Env, spec: ModelSpec, prefix: str) -> None:
        assert spec.gemma is not None
        hidden, rank = spec.hidden_size, spec.gemma.laurel_rank
        self.left = Linear(env, prefix + "linear_left", hidden, rank)
        self.right = Linear(env, prefix + "linear_right", rank, hidden)
        self.norm = RMSNorm(env, prefix + "post_laurel_norm", hidden, spec.norm_eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm.alone(self.right(self.left(x)))


class SparseMLP:
    """A gated MLP that cuts gates to what exceeds a quantile of a normal distribution with their mean and deviation."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str, sparsity: float) -> None:
        size, hidden = spec.mlp_size(index), spec.hidden_size
        names = [prefix + "gate_proj", prefix + "up_proj"]
        self.gate_up = Linear(env, names, hidden, [size, size], cut="rows")
        self.down = Linear(env, prefix + "down_proj", size, hidden, cut="cols")
        self.activation, self.parallel, self.size = ACTIVATIONS[spec.activation], env.parallel, size
        self.quantile = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * sparsity - 1)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        wide = gate.float()
        mean = self.parallel.all_reduce(wide.sum(-1, keepdim=True)) / self.size
        squares = self.parallel.all_reduce((wide - mean).square().sum(-1, keepdim=True)) / self.size
        gate = F.relu(wide - (mean + squares.sqrt() * self.quantile)).to(x.dtype)
        return self.down(self.activation(gate) * up)


class Gemma3nLayer(DecoderLayer):
    """A layer of Gemma 3n, on all streams."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        gemma = spec.gemma
        assert gemma is not None
        self.active, self.index = gemma.active_stream, index
        self.altup = AltUp(env, spec, prefix + "altup.")
        self.laurel = Laurel(env, spec, prefix + "laurel.")
        self.attn = GemmaAttention(env, spec, index, prefix + "self_attn.", PassThrough())
        self.norms = [
            self.make_norm(env, spec, prefix, name)
            for name in (
                "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
            )
        ]  # fmt: skip
        sparsity = gemma.sparsity[index] if gemma.sparsity else 0.0
        self.feed = (
            SparseMLP(env, spec, index, prefix + "mlp.", sparsity)
            if sparsity
            else self.make_mlp(env, spec, index, prefix)
        )
        self.gate = LayerEmbeddingGate(env, spec, prefix)

    def run(
        self, streams: torch.Tensor, rotation: Rotation, batch: ForwardBatch, embedded: torch.Tensor
    ) -> torch.Tensor:
        """Return the streams behind the layer; `embedded` is its embedding of each token, [tokens, width]."""
        before, after, before_mlp, after_mlp = self.norms
        predicted = self.altup.predict(streams)
        normed = before.alone(predicted[self.active].contiguous())
        attended, needed = self.attn(normed, None, rotation, batch)
        assert needed is not None
        if self.attn.is_last and batch.wanted is not None:
            predicted = predicted.index_select(1, batch.wanted)
        x = predicted[self.active] + after.alone(attended)
        x = (x + self.laurel(needed)) * 0.5**0.5
        x = x + after_mlp.alone(self.feed(before_mlp.alone(x)))
        corrected = self.altup.correct(predicted, x)
        active = corrected[self.active]
        if self.altup.scales:
            active = active * self.altup.output
        added = self.gate(active, narrowed(embedded, batch, self.attn.is_last))
        corrected[1:] += added
        return corrected


class Gemma3nModel(DecoderModel):
    """Gemma 3n, text part."""

    layer_class = Gemma3nLayer
    layers: Sequence[Gemma3nLayer]

    def __init__(self, env: Env, spec: ModelSpec) -> None:
        super().__init__(env, spec)
        assert spec.gemma is not None
        self.embeddings = LayerEmbeddings(env, spec, self.prefix)
        hidden = spec.hidden_size
        self.into, self.out_of = (
            [Linear(env, f"{self.prefix}{name}.{i}", hidden, hidden) for i in range(spec.gemma.streams - 1)]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        rotations = [rope.lookup(batch.positions) for rope in self.ropes]
        x = self.embed(batch.input_ids)
        by_layer = self.embeddings(batch.input_ids, x)
        streams = torch.stack([x, *(_as_large(into(x), x) for into in self.into)])
        for layer, rope, own in zip(self.layers, self.rope_of, by_layer):
            streams = layer.run(streams, rotations[rope], batch, own)
        first, *others = streams.unbind(0)
        merged = [first, *(_as_large(out(x), first) for out, x in zip(self.out_of, others))]
        return self.norm.alone(torch.stack(merged).mean(0))


def _as_large(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return x scaled, row by row, to the root mean square of `like`."""
    size = x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    return x * like.square().mean(-1, keepdim=True).sqrt() / size
