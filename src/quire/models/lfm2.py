"""LFM2 (arXiv:2511.23404): short convolutions with gates in most layers, attention in the others."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mixer_params import ShortConvParams
from quire.layers.mlp import GatedMLP
from quire.layers.residual import NormedLayer, ResidualAdd, ResidualNorm, Stream
from quire.layers.rope import Rotation
from quire.layers.state.conv import causal_conv
from quire.layers.state.rows import StateRows
from quire.models.decoder import DecoderModel
from quire.models.layouts import AttentionHalf, DecoderLayer, FeedForward
from quire.models.spec import ModelSpec


class ShortConvolution:
    """out(c * convolution(b * x)), where b, c and x are projections of the input.

    `norm` is the norm in front. For `adds` see `ResidualAdd`.
    """

    attention = None

    def __init__(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> None:
        params = spec.mixer
        assert isinstance(params, ShortConvParams)
        self.index, self.is_last = index, index == spec.num_layers - 1
        width, channels, hidden = params.width, params.channels, spec.hidden_size
        inputs = Linear(env, prefix + "in_proj", hidden, [channels] * 3, params.bias, cut="rows")
        self.inputs = NormedLayer(norm, inputs)
        own = env.parallel.cut(channels)
        weight = env.weights.tensor(prefix + "conv.weight", (channels, 1, width), own)
        self.weight = weight[:, 0].t().contiguous().to(env.device, torch.float32)  # [width, channels]
        self.bias = None
        if params.bias:
            bias = env.weights.tensor(prefix + "conv.bias", (channels,), own)
            self.bias = bias.to(env.device, torch.float32)
        self.out = ResidualAdd(
            Linear(env, prefix + "out_proj", channels, hidden, params.bias, cut="cols"), adds
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        gates, residual = self.inputs(x, residual)
        before, after, x = gates.chunk(3, 1)
        (window,) = batch.states[self.index]
        x = after * causal_conv(before * x, self.weight, self.bias, window, StateRows.of(batch))
        if self.is_last:
            assert residual is not None  # the norm in front returned one
            x, residual = batch.narrow(x, residual)
        return self.out(x, residual)


class Lfm2Layer(DecoderLayer):
    """A decoder layer that convolves or attends."""

    def make_attention(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> AttentionHalf:
        """Build the attention or the convolution of layer `index`."""
        if spec.attends[index]:
            return super().make_attention(env, spec, index, prefix, norm, adds)
        prefix = prefix.removesuffix("self_attn.") + "conv."
        return ShortConvolution(env, spec, index, prefix, norm, adds)

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the gated MLP of layer `index`."""
        sizes = spec.hidden_size, spec.intermediate_size
        stored = ("w1", "w3", "w2")
        return GatedMLP(env, prefix + "feed_forward.", *sizes, spec.activation, stored=stored)


class Lfm2Model(DecoderModel):
    """An LFM2 model."""

    layer_class = Lfm2Layer
