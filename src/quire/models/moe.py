"""Mixture-of-experts models, Mixtral and Qwen3-MoE: the decoder with experts instead of some MLPs.

The two name their expert tensors differently. The spec lists the layers that have experts.
"""

from __future__ import annotations

from quire.layers.env import Env
from quire.layers.moe import MoE
from quire.models.decoder import DecoderModel
from quire.models.layouts import DecoderLayer, FeedForward
from quire.models.spec import ModelSpec

# Prefix of the block, and names of its gate, up and down projections: Qwen3-MoE's and Mixtral's.
_SPELLINGS = (("mlp.", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe.", ("w1", "w3", "w2")))


class MoELayer(DecoderLayer):
    """A decoder layer whose feed-forward half is a set of experts if the spec lists it as sparse."""

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the experts, or a gated MLP."""
        moe = spec.moe
        if moe is None or not moe.sparse[index]:
            return super().make_mlp(env, spec, index, prefix)
        spelled = (s for s in _SPELLINGS if env.weights.has(prefix + s[0] + "gate.weight"))
        block, names = next(spelled, _SPELLINGS[0])
        return MoE(
            env,
            prefix + block,
            names,
            spec.hidden_size,
            moe.intermediate_size,
            moe.num_experts,
            moe.top_k,
            moe.norm_topk,
            spec.activation,
        )


class MoEModel(DecoderModel):
    """Mixtral (arXiv:2401.04088) and Qwen3-MoE (arXiv:2505.09388)."""

    layer_class = MoELayer
