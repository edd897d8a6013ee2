"""gpt-oss: the decoder with attention sinks, and experts whose rows of gate and up alternate in the checkpoint."""

from __future__ import annotations

from quire.layers.env import Env
from quire.layers.expert_weights import load_interleaved_experts
from quire.layers.mlp import CLAMPED_SWIGLU
from quire.layers.moe import MoE, make_experts
from quire.layers.routing import make_router
from quire.models.decoder import DecoderModel
from quire.models.layouts import DecoderLayer, FeedForward
from quire.models.spec import ModelSpec


class GptOssLayer(DecoderLayer):
    """A decoder layer with experts."""

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the experts."""
        moe, prefix = spec.moe, prefix + "mlp."
        assert moe is not None
        router = make_router(env, prefix + "router", spec.hidden_size, moe.routing)
        sizes = moe.routing.num_experts, spec.hidden_size, moe.intermediate_size
        weights = load_interleaved_experts(env, prefix + "experts.", *sizes)
        return MoE(router, make_experts(env, weights, CLAMPED_SWIGLU), env.parallel)


class GptOssModel(DecoderModel):
    """gpt-oss-20b and 120b (arXiv:2508.10925)."""

    layer_class = GptOssLayer
