"""The router of Gemma 4."""

from __future__ import annotations

import torch

from quire.kernels.experts.choice import ExpertChoice
from quire.layers.env import Env
from quire.layers.query_key import unit_norm
from quire.layers.routing import choose_experts
from quire.layers.routing_params import Routing


class GemmaRouter:
    """A `Router` of normed tokens, whose experts have a factor each."""

    def __init__(self, env: Env, prefix: str, hidden: int, routing: Routing, eps: float) -> None:
        self.routing, self.eps = routing, eps
        experts = routing.num_experts
        scale = env.weights.tensor(prefix + "scale", (hidden,)).float() * hidden**-0.5
        weight = env.weights.tensor(prefix + "proj.weight", (experts, hidden)).float() * scale
        self.weight = weight.to(env.device)
        self.factors = env.weights.tensor(prefix + "per_expert_scale", (experts,)).to(
            env.device, torch.float32
        )

    def __call__(self, x: torch.Tensor) -> ExpertChoice:
        """Return the experts of the tokens x [tokens, hidden]."""
        logits = unit_norm(x.float(), self.eps) @ self.weight.t()
        ids, weights = choose_experts(logits, self.routing)
        return ExpertChoice(ids, weights * self.factors[ids])
