"""Granite 4: Mamba-2 in most layers, and routed experts beside an MLP that sees every token."""

from __future__ import annotations

from quire.layers.env import Env
from quire.layers.expert_weights import load_experts
from quire.layers.moe import MoE, make_experts
from quire.layers.routing import make_router
from quire.models.decoder import DecoderModel
from quire.models.hybrid import HybridLayer
from quire.models.layouts import DecoderLayer, FeedForward
from quire.models.spec import ModelSpec


class GraniteHybridLayer(HybridLayer):
    """A hybrid layer with Granite's experts, whose shared one is the MLP of layers without experts."""

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the MLP, with the routed experts if there are any."""
        mlp, moe = DecoderLayer.make_mlp(self, env, spec, index, prefix), spec.moe
        if moe is None:
            return mlp
        block = prefix + "block_sparse_moe."
        router = make_router(env, block + "router.layer", spec.hidden_size, moe.routing)
        weights = load_experts(
            env,
            block,
            moe.routing.num_experts,
            spec.hidden_size,
            moe.intermediate_size,
            stacked=("input_linear.weight", "output_linear.weight"),
        )
        return MoE(router, make_experts(env, weights, spec.activation), env.parallel, mlp)


class GraniteHybridModel(DecoderModel):
    """A Granite 4 model."""

    layer_class = GraniteHybridLayer
