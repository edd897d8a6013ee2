"""Nemotron-H (arXiv:2504.03624) and Nemotron 3 Nano: layers that are one Mamba-2, attention, MLP or set of experts."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.activation import ACTIVATIONS
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mlp import PlainMLP
from quire.layers.moe import MoE
from quire.layers.plain_experts import load_plain_experts
from quire.layers.residual import NormedLayer, Stream
from quire.layers.rope import Rotation
from quire.layers.routing import PlainRouter
from quire.models.decoder import DecoderModel
from quire.models.hybrid import HybridLayer
from quire.models.layouts import AttentionHalf, FeedForward
from quire.models.spec import ModelSpec


class FeedForwardOnly:
    """A layer without attention or state: x + layer(norm(x))."""

    attention = None

    def __init__(self, layer: NormedLayer, is_last: bool) -> None:
        self.layer, self.is_last = layer, is_last

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        if self.is_last:
            x, residual = batch.narrow(x, x if residual is None else residual)
        return self.layer(x, residual)


class LatentExperts:
    """Experts between two projections, from the residual stream to a narrower latent and back."""

    def __init__(self, moe: MoE, shared: FeedForward | None, down: Linear, up: Linear) -> None:
        self.moe, self.shared, self.down, self.up = moe, shared, down, up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.moe.mix(self.down(x), self.moe.router(x)))
        return y if self.shared is None else y + self.shared(x)


class NemotronHLayer(HybridLayer):
    """A layer that is only one half of a usual one."""

    attn: AttentionHalf

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        norm = self.make_norm(env, spec, prefix, "layer_norm")
        if spec.feeds[index]:
            layer = NormedLayer(norm, self.make_mlp(env, spec, index, prefix))
            self.attn = FeedForwardOnly(layer, index == spec.num_layers - 1)
        else:
            self.attn = self.make_attention(env, spec, index, prefix + "self_attn.", norm)

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the MLP or the experts of layer `index`."""
        moe = spec.moe
        if moe is None or not moe.sparse[index]:
            return super().make_mlp(env, spec, index, prefix)
        prefix += "mixer."
        names = prefix + "shared_experts.up_proj", prefix + "shared_experts.down_proj"
        act = ACTIVATIONS[spec.activation]
        shared = None
        if moe.shared_size:
            shared = PlainMLP(env, names, spec.hidden_size, moe.shared_size, act, spec.mlp_bias)
        inner = moe.latent_size or spec.hidden_size
        experts = load_plain_experts(
            env, prefix + "experts.", moe.routing.num_experts, inner, moe.intermediate_size, spec.activation
        )
        router = PlainRouter(env, prefix + "gate", spec.hidden_size, moe.routing)
        if not moe.latent_size:
            return MoE(router, experts, env.parallel, shared)
        bias = spec.mlp_bias
        down = Linear(env, prefix + "fc1_latent_proj", spec.hidden_size, inner, bias)
        up = Linear(env, prefix + "fc2_latent_proj", inner, spec.hidden_size, bias)
        return LatentExperts(MoE(router, experts, env.parallel), shared, down, up)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        return self.attn(x, residual, rotation, batch)


class NemotronHModel(DecoderModel):
    """A Nemotron-H model."""

    layer_class = NemotronHLayer
