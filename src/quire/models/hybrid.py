"""Hybrid decoders: some layers mix tokens through a state per request instead of attention.

`ModelSpec.mixes` says which, and `ModelSpec.mixer` what the state is. Names that differ between families are entries of
`ModelSpec.names`: `mixer` and `attention`, the prefixes of these parts in a layer.
"""

from __future__ import annotations

from quire.layers.env import Env
from quire.layers.mixer_params import (
    DeltaParams,
    LightningParams,
    SelectiveScanParams,
    ShortConvParams,
    StateSpaceParams,
)
from quire.layers.residual import ResidualNorm
from quire.layers.state.gated_delta import GatedDeltaNet
from quire.layers.state.kimi_delta import KimiDeltaAttention
from quire.layers.state.lightning import LightningAttention
from quire.layers.state.mamba1 import Mamba1
from quire.layers.state.mamba2 import Mamba2
from quire.layers.state.mixer import MixerPlace, StateMixer
from quire.layers.state.short_conv import ShortConvolution
from quire.models.decoder import DecoderModel
from quire.models.deepseek import LatentSelfAttention
from quire.models.gated_attention import GatedSelfAttention
from quire.models.layouts import AttentionHalf, SelfAttention
from quire.models.moe import MoELayer
from quire.models.spec import ModelSpec


def make_mixer(env: Env, spec: ModelSpec, place: MixerPlace) -> StateMixer:
    """Build the mixer of a layer with a state."""
    params = spec.mixer
    if isinstance(params, DeltaParams):
        made = KimiDeltaAttention if params.stored == "kimi" else GatedDeltaNet
        return made(env, params, place)
    if isinstance(params, StateSpaceParams):
        return Mamba2(env, params, place)
    if isinstance(params, SelectiveScanParams):
        return Mamba1(env, params, place)
    if isinstance(params, LightningParams):
        return LightningAttention(env, params, place, spec.num_layers, spec.activation)
    assert isinstance(params, ShortConvParams)
    return ShortConvolution(env, params, place)


class HybridLayer(MoELayer):
    """A decoder layer whose first half is a mixer or attention, and whose second is an MLP or experts."""

    def make_attention(
        self, env: Env, spec: ModelSpec, index: int, prefix: str, norm: ResidualNorm, adds: bool = True
    ) -> AttentionHalf:
        """Build the mixer or the attention of layer `index`."""
        layer = prefix.removesuffix("self_attn.")
        if spec.mixes[index]:
            last = index == spec.num_layers - 1
            return make_mixer(
                env,
                spec,
                MixerPlace(
                    index=index, is_last=last, prefix=f"{layer}{spec.names.get('mixer', 'mamba')}.",
                    hidden=spec.hidden_size, eps=spec.norm_eps, norm=norm, adds=adds,
                ),
            )  # fmt: skip
        prefix = f"{layer}{spec.names.get('attention', 'self_attn')}."
        made = GatedSelfAttention if spec.query_gate else SelfAttention
        if spec.latent:
            return LatentSelfAttention(env, spec, index, prefix, norm, adds)
        return made(env, spec, index, prefix, norm, adds)


class HybridModel(DecoderModel):
    """A decoder of hybrid layers."""

    layer_class = HybridLayer
