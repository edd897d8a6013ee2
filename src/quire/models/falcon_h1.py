"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in every layer, with scaled halves."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.layers.mixer_params import StateSpaceParams
from quire.layers.mlp import GatedMLP
from quire.layers.norm import PassThrough
from quire.layers.residual import NormedLayer, Stream
from quire.layers.rope import Rotation
from quire.layers.state.mamba2 import Mamba2
from quire.layers.state.mixer import MixerPlace
from quire.models.decoder import DecoderModel
from quire.models.layouts import DecoderLayer, FeedForward
from quire.models.spec import ModelSpec


class ScaledMLP:
    """A gated MLP whose gate and result are scaled."""

    def __init__(self, mlp: GatedMLP, scales: tuple[float, float]) -> None:
        self.mlp, (self.gate_scale, self.scale) = mlp, scales

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.mlp.gate_up(x).chunk(2, -1)
        return self.mlp.down(self.mlp.activation(torch.cat((gate * self.gate_scale, up), -1))) * self.scale


class FalconH1Layer(DecoderLayer):
    """x + attention(norm(x)) + state space(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> None:
        params, scales = spec.mixer, spec.half_scales
        assert isinstance(params, StateSpaceParams) and scales is not None
        self.norm = self.make_norm(env, spec, prefix, "input_layernorm")
        self.attn = self.make_attention(env, spec, index, prefix + "self_attn.", PassThrough(), adds=False)
        place = MixerPlace(
            index=index,
            is_last=index == spec.num_layers - 1,
            prefix=prefix + "mamba.",
            hidden=spec.hidden_size,
            eps=spec.norm_eps,
            norm=PassThrough(),
            adds=False,
        )
        self.mixer = Mamba2(env, params, place)
        self.attn_scale, self.mixer_scale = scales
        post_norm = self.make_norm(env, spec, prefix, "post_attention_layernorm")
        self.mlp = NormedLayer(post_norm, self.make_mlp(env, spec, index, prefix), adds=True)

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the MLP, scaled if the spec says so."""
        mlp = super().make_mlp(env, spec, index, prefix)
        assert isinstance(mlp, GatedMLP)
        return mlp if spec.mlp_scales == (1.0, 1.0) else ScaledMLP(mlp, spec.mlp_scales)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        x, residual = self.norm(x, residual)
        attended, _ = self.attn(x, None, rotation, batch)
        mixed, _ = self.mixer(x, None, rotation, batch)
        if self.attn.is_last:
            residual, _ = batch.narrow(residual, residual)
        return self.mlp(attended * self.attn_scale + mixed * self.mixer_scale, residual)


class FalconH1Model(DecoderModel):
    """A Falcon-H1 model."""

    layer_class = FalconH1Layer
