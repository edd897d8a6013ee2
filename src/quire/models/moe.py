"""Mixture-of-experts models, Mixtral and Qwen3-MoE: the decoder with experts instead of some MLPs.

The two name their expert tensors differently. The spec lists the layers that have experts.
"""

from __future__ import annotations

from quire.layers.env import Env
from quire.layers.expert_weights import MIXTRAL, STACKED, USUAL, load_experts, stored_alike
from quire.layers.moe import MoE, SharedExperts, make_experts
from quire.layers.routing import make_router
from quire.layers.shared_experts import stack_shared
from quire.models.decoder import DecoderModel
from quire.models.layouts import DecoderLayer, FeedForward
from quire.models.spec import ModelSpec

# Prefix of the block, name of the router, and names of an expert's projections.
_SPELLINGS = (
    ("mlp.", "gate", USUAL),
    ("block_sparse_moe.", "gate", MIXTRAL),
    ("feed_forward.", "gate", MIXTRAL),  # LFM2
    ("feed_forward.", "router", USUAL),  # Jamba
)
# Name of the shared experts: Qwen2-MoE's, which has a gate beside it, and that of other families.
_SHARED = ("shared_expert", "shared_experts")


class MoELayer(DecoderLayer):
    """A decoder layer whose feed-forward half is a set of experts if the spec lists it as sparse."""

    def make_mlp(self, env: Env, spec: ModelSpec, index: int, prefix: str) -> FeedForward:
        """Build the experts, or a gated MLP."""
        if spec.moe is None or not spec.moe.sparse[index]:
            return super().make_mlp(env, spec, index, prefix)
        return make_moe(env, spec, prefix)


def make_moe(env: Env, spec: ModelSpec, prefix: str) -> MoE:
    """Build the experts of the layer at `prefix`, with the names that its checkpoint has."""
    moe = spec.moe
    assert moe is not None
    spelled = (
        (block, gate, names)
        for block, usual, names in _SPELLINGS
        for gate in (spec.names.get("gate", usual),)
        if env.weights.has(f"{prefix}{block}{gate}.weight")
    )
    block, gate_name, names = next(spelled, _SPELLINGS[0])
    block = prefix + block
    hidden, width, routing, act = spec.hidden_size, moe.intermediate_size, moe.routing, spec.activation
    where = block + spec.names.get("experts", "experts.")
    stacked = tuple(spec.names.get(f"stacked_{name}", name) for name in STACKED)
    spelling = names, (stacked[0], stacked[1])
    name = block + spec.names.get("shared_experts", _SHARED[not moe.shared_gate])
    gate = name + "_gate" if moe.shared_gate else None
    beside = stack_shared(env, name + ".", hidden, moe.shared_size, width, routing, act, gate)
    if beside and not stored_alike(env, where, hidden, width, *spelling, beside):
        beside = None
    router = make_router(env, block + gate_name, hidden, routing, beside)
    weights = load_experts(env, where, routing.num_experts, hidden, width, *spelling, beside)
    shared = None
    if moe.shared_size and beside is None:
        shared = SharedExperts(env, name + ".", hidden, moe.shared_size, act, gate)
    return MoE(router, make_experts(env, weights, act), env.parallel, shared)


class MoEModel(DecoderModel):
    """Mixtral (arXiv:2401.04088) and Qwen3-MoE (arXiv:2505.09388)."""

    layer_class = MoELayer
