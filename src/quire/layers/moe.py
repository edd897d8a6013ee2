"""Mixture of experts: a router picks `top_k` expert MLPs per token and mixes their outputs.

Tokens are sorted by expert, so each expert runs once per step on all of its tokens. On a GPU nothing waits for the
host, because group boundaries stay on the device. On a CPU only experts that have tokens run, each with packed
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from quire.kernels import Kernels, available
from quire.kernels.target import Target, log_choice, target_of
from quire.layers.activation import Activation
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mlp import gated
from quire.quant.base import make_matmul


class MoE:
    """Router (softmax over all experts, then top k) and expert MLPs (Mixtral, arXiv:2401.04088)."""

    def __init__(
        self,
        env: Env,
        prefix: str,
        names: tuple[str, str, str],
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        norm_topk: bool,
        activation: str,
    ) -> None:
        """Load the router and the experts.

        Args:
            env: the weights, and the ranks to shard over.
            prefix: prefix of the tensor names.
            names: names of the gate, up and down projections below `{prefix}experts.{number}.`.
            hidden: width of the residual stream.
            intermediate: width of an expert, before sharding.
            num_experts: number of experts.
            top_k: experts per token.
            norm_topk: whether the weights of a token's experts are scaled to sum to 1.
            activation: key of `ACTIVATIONS`.
        """
        self.router = Linear(env, prefix + "gate", hidden, num_experts)
        self.top_k = top_k
        self.norm_topk = norm_topk
        self.parallel = env.parallel
        gate_up, down = _load_experts(env, prefix, names, hidden, intermediate, num_experts)
        act = gated(activation, env.kernels)
        self.experts: Experts = (
            LoopedExperts(gate_up, down, act, env.kernels)
            if env.device.type == "cpu"
            else GroupedExperts(gate_up, down, act, pick_product(env.device, env.dtype, *down.shape[1:]))
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        probs = self.router(x).float().softmax(-1)  # [tokens, experts]
        weights, ids = probs.topk(self.top_k, -1)  # [tokens, k]
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.flatten()
        order = flat.argsort(stable=True)  # [tokens * k], by expert
        outs = self.experts(x[order // self.top_k], flat[order])
        by_token = (
            torch.empty_like(outs).index_copy_(0, order, outs).view(*ids.shape, -1)
        )  # [tokens, k, hidden]
        # The order of summation is fixed, so a token's result does not depend on the rest of the batch.
        return self.parallel.all_reduce((by_token * weights.to(x.dtype).unsqueeze(-1)).sum(1))


class Experts(Protocol):
    """The expert MLPs: from rows x [n, hidden], sorted by their expert ids [n], to [n, hidden]."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...


class LoopedExperts:
    """Experts as one product after the other, for a CPU."""

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, kernels: Kernels | None
    ) -> None:
        self.gate_up = [make_matmul(weight, None, kernels) for weight in gate_up]
        self.down = [make_matmul(weight, None, kernels) for weight in down]
        self.activation = activation

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        start = 0
        for expert, count in enumerate(ids.bincount(minlength=len(self.down)).tolist()):
            if count:
                rows = slice(start, start + count)
                out[rows] = self.down[expert](self.activation(self.gate_up[expert](x[rows])))
                start += count
        return out


# Maps x [rows, inputs], sorted by expert, weight [experts, outputs, inputs], and the end of each expert's rows,
# int32 [experts], to [rows, outputs].
GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class GroupedExperts:
    """Experts as two grouped products, which never wait for the device."""

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, product: GroupedProduct
    ) -> None:
        self.gate_up, self.down = gate_up, down
        self.activation, self.product = activation, product
        self.numbers = torch.arange(down.shape[0], device=down.device)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ends = torch.searchsorted(ids, self.numbers, right=True).to(torch.int32)
        return self.product(self.activation(self.product(x, self.gate_up, ends)), self.down, ends)


def pick_product(device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int) -> GroupedProduct:
    """Return the fastest grouped product that can be captured in a CUDA graph."""
    if not available(device):
        log_choice("MoE: every expert runs on every row, which is slow; install Triton to avoid it")
        return masked_product
    target = target_of(device)
    if grouped_in_library(target, dtype, hidden, intermediate):
        return library_product
    from quire.kernels.matmul.grouped import grouped_product

    log_choice(f"MoE: experts in {str(dtype)[6:]} on {target} use Quire's grouped product")
    return grouped_product


def grouped_in_library(target: Target, dtype: torch.dtype, hidden: int, intermediate: int) -> bool:
    """Return whether PyTorch's grouped product supports these sizes without waiting for the device."""
    return target.has_grouped_mm and dtype == torch.bfloat16 and hidden % 8 == intermediate % 8 == 0


def library_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute a `GroupedProduct` with PyTorch's operator."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def masked_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute a `GroupedProduct` in plain PyTorch without a host sync, with `experts` times the work."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    row = torch.arange(x.shape[0], device=x.device)
    owner = torch.searchsorted(ends, row, right=True, out_int32=True)
    for expert in range(weight.shape[0]):
        out = torch.where((owner == expert).unsqueeze(-1), x @ weight[expert].t(), out)
    return out


def _load_experts(
    env: Env, prefix: str, names: tuple[str, str, str], hidden: int, intermediate: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate_up [experts, 2 * part, hidden] and down [experts, hidden, part] of this rank's part."""
    cut = env.parallel.cut(intermediate)
    part = cut.stop - cut.start
    gate_up = torch.empty(num_experts, 2 * part, hidden, device=env.device, dtype=env.dtype)
    down = torch.empty(num_experts, hidden, part, device=env.device, dtype=env.dtype)
    for expert in range(num_experts):
        gate_name, up_name, down_name = (f"{prefix}experts.{expert}.{name}.weight" for name in names)
        env.weights.copy_into(gate_up[expert, :part], gate_name, (intermediate, hidden), cut)
        env.weights.copy_into(gate_up[expert, part:], up_name, (intermediate, hidden), cut)
        env.weights.copy_into(down[expert], down_name, (hidden, intermediate), slice(None), cut)
    return gate_up, down
