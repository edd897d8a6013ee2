"""Llama 4: the decoder with experts that weigh their inputs, and a shared expert."""

from __future__ import annotations

from quire.layers.env import Env
from quire.layers.expert_weights import load_transposed_experts
from quire.layers.moe import InputWeighted, MoE, SharedExperts, make_experts
from quire.layers.routing import make_router
from quire.models.decoder import DecoderModel
from quire.models.layouts import DecoderLayer, FeedForward
from quire.models.spec import ModelSpec


class Llama4Layer(DecoderLayer):
    """A decoder layer whose feed-forward half is a set of experts if the spec lists it as sparse."""

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the experts, or a gated MLP."""
        if spec.moe is None or not spec.moe.sparse[index]:
            return super().make_mlp(env, spec, index, prefix)
        moe, hidden, prefix = spec.moe, spec.hidden_size, prefix + "feed_forward."
        router = make_router(env, prefix + "router", hidden, moe.routing)
        sizes = moe.routing.num_experts, hidden, moe.intermediate_size
        experts = make_experts(
            env, load_transposed_experts(env, prefix + "experts.", *sizes), spec.activation
        )
        shared = SharedExperts(env, prefix + "shared_expert.", hidden, moe.shared_size, spec.activation)
        return MoE(router, InputWeighted(experts), env.parallel, shared)


class Llama4Model(DecoderModel):
    """Llama 4 Scout and Maverick, text part."""

    layer_class = Llama4Layer
