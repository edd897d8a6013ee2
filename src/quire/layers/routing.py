"""`Router`: picks the experts of each token and their weights, in fp32.

`choose_experts` defines the rule in plain PyTorch. kernels/experts/ computes the same in one kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from quire.kernels import available
from quire.kernels.cpu.ops import CpuKernels
from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.target import log_choice, target_of
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.routing_params import Routing

if TYPE_CHECKING:
    from quire.layers.shared_experts import StackedShared


class Router(Protocol):
    """Linear layer from the residual stream to one logit per expert, and the choice of the largest.

    Logits are computed in fp32, because a rounded logit can choose another expert.
    """

    def __call__(self, x: torch.Tensor) -> ExpertChoice:
        """Return the experts of the tokens x [tokens, hidden]."""
        ...


class FusingRouter(Router):
    """A router that can be fused with the norm in front of it, for at most `fused_rows` tokens."""

    fused_rows: int

    @abstractmethod
    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[ExpertChoice, torch.Tensor, torch.Tensor]:
        """Route rms_norm(x + residual).

        Args:
            x: [tokens, hidden].
            residual: [tokens, hidden], or None.
            norm: weight of the RMS norm, [hidden].
            eps: of the norm.

        Returns:
            The choice, the normed rows, and the sum x + residual, which is x itself without a residual.
        """


def make_router(
    env: Env, name: str, hidden: int, routing: Routing, shared: StackedShared | None = None
) -> Router:
    """Load a router: `{name}.weight`, and the tensors `.bias` and `.e_score_correction_bias` if the rule has them.

    The `shared` experts, if they are stacked behind the others, become part of each choice.
    """
    if fuses_experts(env.device, env.dtype) and routing.scores != "sparsemixer":
        from quire.layers.fused_experts import FusedRouter

        return FusedRouter(env, name, hidden, routing, shared)
    if isinstance(env.kernels, CpuKernels):
        from quire.layers.c_experts import CRouter

        return CRouter(env, env.kernels, name, hidden, routing)
    return PlainRouter(env, name, hidden, routing)


def fuses_experts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether routers and experts are the kernels of kernels/experts/."""
    if not available(device) or dtype not in (torch.bfloat16, torch.float16):
        return False
    target = target_of(device)
    if not target.has_matrix_units:
        log_choice(
            f"MoE: experts without fused kernels, because Triton does not use the matrix units of {target}"
        )
    return target.has_matrix_units


class PlainRouter(Router):
    """A router in plain PyTorch."""

    def __init__(self, env: Env, name: str, hidden: int, routing: Routing) -> None:
        precise = replace(env, dtype=torch.float32)
        self.routing = routing
        self.logits = Linear(precise, name, hidden, routing.num_experts, routing.bias)
        self.correction = load_correction(env, name, routing)

    def __call__(self, x: torch.Tensor) -> ExpertChoice:
        return ExpertChoice(*choose_experts(self.logits(x.float()), self.routing, self.correction))


def load_correction(env: Env, name: str, routing: Routing) -> torch.Tensor | None:
    """Return the bias of the choice, float32 [experts], or None if the rule has none.

    Its name is `{name}.e_score_correction_bias`; MiniMax-M2 stores it beside the router instead, LFM2 calls it
    `expert_bias` there, and ERNIE 4.5 has it in `moe_statics`.
    """
    if not routing.correction:
        return None
    suffix, block = "e_score_correction_bias", name.rpartition(".")[0]
    shape, ernie = (routing.num_experts,), f"{block}.moe_statics.{suffix}"
    if env.weights.has(ernie):
        return env.weights.tensor(ernie, (1, *shape))[0].to(env.device, torch.float32)
    spelled = (f"{name}.{suffix}", f"{block}.{suffix}", f"{block}.expert_bias")
    found = next((each for each in spelled if env.weights.has(each)), spelled[0])
    return env.weights.tensor(found, shape).to(env.device, torch.float32)


def choose_experts(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts and their weights, int64 and float32 [tokens, top_k], the largest score first.

    Args:
        logits: float32 [tokens, experts].
        routing: the rule.
        correction: float32 [experts], added to the scores for the choice; None if the rule has none.
    """
    if routing.scores == "sparsemixer":
        return _sparsemixer(logits, routing)
    scores = logits.softmax(-1) if routing.scores == "softmax" else exact_sigmoid(logits)
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


def _sparsemixer(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one expert after the other; its weight is its softmax among the remaining ones that are close to it."""
    left, ids, weights = logits, [], []
    for _ in range(routing.top_k):
        top, best = left.max(-1, keepdim=True)
        is_far = (top - logits) / logits.abs().clamp(min=top) > 2 * routing.jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, best))
        ids.append(best)
        left = left.scatter(-1, best, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)


def exact_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of x, computed in fp64.

    On a CPU, PyTorch's fp32 sigmoid of an element depends on its place in the tensor: the last elements, which do not
    fill a vector, are computed by another function. A token's result must not depend on the rest of the batch.
    """
    return x.double().sigmoid().to(x.dtype)
