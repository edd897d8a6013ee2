"""Router and experts in Triton kernels, for a GPU; everything can be captured in a CUDA graph.

Up to 16 tokens take three kernels: norm, product and rule of the router; gate and up of the chosen experts; their down
projections and the weighted sum. A single token uses matrix-vector kernels. More tokens are grouped by expert first. Import this module only if `fuses_experts`
returns True.
"""

from __future__ import annotations

import torch

from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.experts.few import BLOCK_DOWN, few_down, few_gate_up
from quire.kernels.experts.group import group
from quire.kernels.experts.many import many_down, many_gate_up, tiles_for, weighted_sum
from quire.kernels.experts.one import ExpertMatrices, one_down, one_gate_up, takes_one
from quire.kernels.experts.route import FEW_TOKENS, rule_arguments
from quire.kernels.experts.router import norm_and_route, route_all
from quire.kernels.target import target_of
from quire.layers.env import Env
from quire.layers.expert_weights import ExpertWeights
from quire.layers.routing import FusingRouter, load_correction
from quire.layers.routing_params import Routing
from quire.layers.shared_experts import StackedShared


class FusedRouter(FusingRouter):
    """A router whose product and rule are kernels; with few tokens, they are one kernel with the norm in front."""

    fused_rows = FEW_TOKENS

    def __init__(
        self, env: Env, name: str, hidden: int, routing: Routing, shared: StackedShared | None = None
    ) -> None:
        """Load the router, and the gate of the shared experts, which it adds to each choice."""
        experts = routing.num_experts
        gated = shared is not None and shared.gate is not None
        self.weight = torch.empty(experts + gated, hidden, device=env.device, dtype=env.dtype)
        env.weights.copy_into(self.weight[:experts], name + ".weight", (experts, hidden))
        if shared is not None and gated:
            shared.copy_gate(env, self.weight[experts:])
        self.bias: torch.Tensor | None = None
        if routing.bias:
            self.bias = torch.zeros(experts + gated, device=env.device)
            self.bias[:experts] = env.weights.tensor(name + ".bias", (experts,)).to(env.device)
        self.correction = load_correction(env, name, routing)
        self.rule = rule_arguments(
            experts,
            routing.top_k,
            routing.scores == "sigmoid",
            routing.renormalise,
            routing.scale,
            routing.groups,
            routing.top_groups,
            routing.group_score == "two_largest",
            0 if shared is None else shared.count,
            gated,
        )
        self.arrived = torch.zeros(1, dtype=torch.int32, device=env.device)  # 0 between launches

    def __call__(self, x: torch.Tensor) -> ExpertChoice:
        return route_all(x, self.weight, self.bias, self.correction, self.rule, self.arrived)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[ExpertChoice, torch.Tensor, torch.Tensor]:
        return norm_and_route(
            x, residual, norm, eps, self.weight, self.bias, self.correction, self.rule, self.arrived
        )


class FusedExperts:
    """Unquantised experts on a GPU."""

    is_partial = True

    def __init__(self, weights: ExpertWeights, activation: str) -> None:
        gate_up, down = weights.gate_up, weights.down
        assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.gate_up_bias, self.down_bias = weights.gate_up_bias, weights.down_bias
        self.num_experts, hidden, self.width = down.shape
        self.target = target_of(down.device)
        tiles = -(-hidden // BLOCK_DOWN)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=down.device)  # all 0 between launches
        self.one_gate_up = ExpertMatrices(gate_up, None, self.gate_up_bias)
        self.one_down = ExpertMatrices(down, None, self.down_bias)

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        if choice.active is not None and len(x) == 1 and takes_one(self.one_down, choice.ids.shape[1]):
            return one_down(one_gate_up(x, self.one_gate_up, choice, self.activation), self.one_down, choice)
        if choice.active is not None:
            h = few_gate_up(x, self.gate_up, self.gate_up_bias, choice, self.activation)
            return few_down(h, self.down, self.down_bias, choice, self.arrived)
        first, second = tiles_for(choice.ids.numel() / self.num_experts, self.target)
        grouped = group(choice, self.num_experts, first.rows)
        h = many_gate_up(x, self.gate_up, self.gate_up_bias, grouped, self.activation, first)
        rows = many_down(h, self.down, self.down_bias, grouped, second)
        return weighted_sum(rows, grouped.place, choice.weights)
