"""`Router`: picks the experts of each token and their weights, in fp32.

`choose_experts` defines the rule in plain PyTorch. kernels/routing.py computes the same in one kernel.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.routing_params import Routing


class Router:
    """Linear layer from the residual stream to one logit per expert, and the choice of the largest.

    Logits are computed in fp32, because a rounded logit can choose another expert.
    """

    def __init__(self, env: Env, name: str, hidden: int, routing: Routing) -> None:
        """Load `{name}.weight`, and `{name}.bias` and `{name}.e_score_correction_bias` if the rule has them."""
        precise = replace(env, dtype=torch.float32)
        self.routing = routing
        self.logits = Linear(precise, name, hidden, routing.num_experts, routing.bias)
        self.correction: torch.Tensor | None = None
        if routing.correction:
            stored = env.weights.tensor(name + ".e_score_correction_bias", (routing.num_experts,))
            self.correction = stored.to(env.device, torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of x [tokens, hidden] and their weights: int64 and float32 [tokens, top_k]."""
        return choose_experts(self.logits(x.float()), self.routing, self.correction)


def choose_experts(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts and their weights, int64 and float32 [tokens, top_k], the largest score first.

    Args:
        logits: float32 [tokens, experts].
        routing: the rule.
        correction: float32 [experts], added to the scores for the choice; None if the rule has none.
    """
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        by_group = ranked.unflatten(-1, (routing.groups, -1))  # [tokens, groups, experts of a group]
        summed = 1 if routing.group_score == "max" else min(2, by_group.shape[-1])
        best = by_group.topk(summed, -1).values.sum(-1).topk(routing.top_groups, -1).indices
        is_open = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter_(
            1, best, True
        )
        ranked = by_group.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
    ids = ranked.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * routing.scale
