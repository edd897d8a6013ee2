"""`Routing`: how a router's logits become the experts of a token and their weights. Plain data, without torch.

models/config/ parses it. layers/routing.py computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rule of a router; `choose_experts` in layers/routing.py has the formulas.

    A softmax over the logits of the chosen experts (gpt-oss) is a softmax over all logits, renormalised.

    Attributes:
        num_experts: number of experts.
        top_k: experts per token.
        scores: function from logits to scores; sparsemixer chooses one expert after the other (arXiv:2409.12136).
        renormalise: whether the weights of a token's experts are scaled to sum to 1.
        scale: factor of the weights, after renormalisation.
        jitter: of SparseMixer: experts whose logit is further from the largest, relative to it, do not count.
        bias: whether the router's product has a bias.
        correction: whether a bias is added to the scores for the choice; weights do not contain it (DeepSeek-V3).
        groups: number of groups that the experts are divided into.
        top_groups: number of groups that a token's experts come from.
        group_score: score of a group: its largest score, or the sum of its two largest.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    jitter: float = 0.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "two_largest"] = "max"
