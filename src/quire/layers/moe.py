"""Mixture of experts: a router picks a few expert MLPs per token and adds their weighted outputs.

`Experts` is what a layer needs of its experts; how they are stored and multiplied is up to the implementation. The ones
here sort the tokens by expert, so that each expert runs once per step on all of its tokens. On a GPU nothing waits for
the host, because group boundaries stay on the device. On a CPU only experts that have tokens run, each with packed
weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from quire.kernels import available
from quire.kernels.cpu.experts import ExpertFunctions
from quire.kernels.cpu.ops import CpuKernels
from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.matmul.tiles import ANY_ROWS
from quire.kernels.target import Target, log_choice, target_of
from quire.layers.activation import FUSED_ACTIVATIONS, Activation
from quire.layers.env import Env
from quire.layers.expert_weights import ExpertWeights, StackedWeight
from quire.layers.linear import Linear
from quire.layers.local_experts import ExchangedExperts, LocalExperts, SortedMLPs
from quire.layers.mlp import CLAMPED_SWIGLU, GatedMLP
from quire.layers.mlp import gated as gated_activation
from quire.layers.routing import FusingRouter, Router, exact_sigmoid, fuses_experts
from quire.parallel.ranks import Parallel
from quire.quant.base import FusingMatmul, Matmul, NormedProduct
from quire.quant.products import any_product
from quire.quant.rounding import rounding_of


class Experts(Protocol):
    """The expert MLPs of a layer."""

    @property
    def is_partial(self) -> bool:
        """Return whether the results of all ranks have to be added."""
        ...

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts: [tokens, hidden] for x [tokens, hidden]."""
        ...


class RoundingExperts(Experts):
    """Experts that can be fused with the norm in front of the layer, because they round their inputs.

    Attributes:
        rounds: whether these experts do.
    """

    rounds: bool

    @abstractmethod
    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[ExpertChoice], torch.Tensor]]:
        """Norm and round x + residual, for more tokens than a router lists the chosen experts of.

        Returns:
            The normed rows [tokens, hidden]; the sum; and the function from the choice of the normed rows to their
            results.
        """


class MoE:
    """Routed experts (arXiv:2401.04088) and, in some families, shared ones that see every token."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        parallel: Parallel,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.router, self.experts, self.shared = router, experts, shared
        self.parallel = parallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        return self.mix(x, self.router(x))

    def mix(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """Return the weighted sum of the chosen experts, plus the shared ones."""
        return self._finish(x, self.experts(x, choice))

    def _finish(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y [tokens, hidden], the sum of the chosen experts of this rank, over all ranks and plus the shared ones."""
        if self.experts.is_partial:
            y = self.parallel.all_reduce(y)
        if isinstance(self.shared, SharedExperts):
            return self.shared.add_to(y, x)
        return y if self.shared is None else y + self.shared(x)

    def after_norm(self, norm: torch.Tensor, eps: float) -> tuple[NormedProduct, int] | None:
        """Return the layer fused with the RMS norm in front, and its largest number of tokens; None if it cannot be."""
        router, experts = self.router, self.experts
        if not isinstance(router, FusingRouter):
            return None

        def few(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            choice, normed, total = router.after_norm(x, residual, norm, eps)
            return self.mix(normed, choice), total

        if not isinstance(experts, RoundingExperts) or not experts.rounds:
            return few, router.fused_rows

        def any_number(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if x.shape[0] <= router.fused_rows:
                return few(x, residual)
            normed, total, run = experts.after_norm(x, residual, norm, eps)
            return self._finish(normed, run(router(normed))), total

        return any_number, ANY_ROWS


class SharedExperts:
    """The shared experts of a layer as one gated MLP, times the sigmoid of a logit per token if it has a gate."""

    def __init__(
        self, env: Env, prefix: str, hidden: int, width: int, activation: str, gate: str | None = None
    ) -> None:
        """Load the MLP at `prefix`, of `width` for all shared experts together, and the gate named `gate`."""
        self.mlp = GatedMLP(env, prefix, hidden, width, activation)
        self.gate = None if gate is None else Linear(env, gate, hidden, 1)
        self.functions = ExpertFunctions(env.kernels) if isinstance(env.kernels, CpuKernels) else None
        self.gate_row: torch.Tensor | None = None  # of a plain gate: the library's product cannot be captured
        if (
            self.functions
            and gate
            and isinstance(self.gate, Linear)
            and not isinstance(self.gate.multiply, FusingMatmul)
        ):
            self.gate_row = env.weights.tensor(gate + ".weight", (1, hidden)).to(env.dtype).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x)
        return y if self.gate is None else exact_sigmoid(self.gate(x)) * y

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return y [tokens, hidden] plus the result for x [tokens, hidden]."""
        if self.functions is None:
            return y + self(x)
        x, gate = x.contiguous(), None
        if self.gate_row is not None:
            gate = self.functions.dots(x, self.gate_row)
        elif self.gate is not None:
            gate = self.gate(x).contiguous()
        return self.functions.add_shared(y, self.mlp(x).contiguous(), gate)


def make_experts(env: Env, weights: ExpertWeights, activation: str) -> Experts:
    """Return the fastest implementation of the experts on the device of `env`.

    Args:
        env: the device, and its kernels.
        weights: the experts.
        activation: key of `ACTIVATIONS`, or clamped_swiglu.
    """
    is_plain = isinstance(weights.gate_up, torch.Tensor) and isinstance(weights.down, torch.Tensor)
    # The fused kernels compute every expert that a token has chosen, also those of other ranks.
    fusable = not env.experts.exchange and activation in (*FUSED_ACTIVATIONS, CLAMPED_SWIGLU)
    if fusable and fuses_experts(env.device, env.dtype):
        from quire.layers.fused_experts import FusedExperts
        from quire.layers.quantised_experts import fused_quantised

        if is_plain:
            return FusedExperts(weights, activation)
        if experts := fused_quantised(env, weights, activation):
            return experts
    act, on_cpu = gated_activation(activation, env.kernels), env.device.type == "cpu"
    if on_cpu:
        looped = LoopedMLPs(weights, act, partial(any_product, env))
        return over_ranks(env, looped, lambda many: on_a_cpu(env, looped, many, activation, gated=True))
    product = pick_product(env.device, env.dtype, *weights.down.shape[1:])
    return over_ranks(env, GroupedMLPs(weights, act, with_quantised(product)))


def over_ranks(
    env: Env, mlps: SortedMLPs, improved: Callable[[Experts], Experts] = lambda experts: experts
) -> Experts:
    """Return the experts with these MLPs, shared out over the ranks as `env` says.

    Args:
        env: the ranks.
        mlps: those of this rank.
        improved: replaces this rank's experts by faster ones.
    """
    shard = env.experts
    if shard.exchange is None:
        return improved(SortedExperts(mlps))
    exchanges = shard.exchange == "all-to-all"
    fixed_shapes = not (env.device.type == "cpu" or exchanges)
    local = improved(LocalExperts(mlps, shard.held(shard.total), fixed_shapes))
    return ExchangedExperts(local, shard, env.parallel) if exchanges else local


def on_a_cpu(env: Env, looped: LoopedMLPs, many: Experts, activation: str, gated: bool) -> Experts:
    """Return `many`, which runs the MLPs `looped`, with C kernels for few rows if these take the weights."""
    if not isinstance(env.kernels, CpuKernels):
        return many
    from quire.layers.c_experts import FewRowsExperts, c_expert_mlps

    few = c_expert_mlps(env, looped.gate_up, looped.down, activation, gated)
    return many if few is None else FewRowsExperts(few, many)


class InputWeighted:
    """Experts whose inputs are multiplied by the weights of the choice, instead of their outputs (Llama 4)."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    @property
    def is_partial(self) -> bool:
        return self.experts.is_partial

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        tokens, top_k = choice.ids.shape
        weighted = x.unsqueeze(1) * choice.weights.to(x.dtype).unsqueeze(-1)  # [tokens, top_k, hidden]
        ones = torch.ones_like(choice.weights).view(-1, 1)
        # With one expert for each token, it stays known which were chosen, and how often.
        single = replace(choice, weights=ones) if top_k == 1 else ExpertChoice(choice.ids.view(-1, 1), ones)
        return self.experts(weighted.flatten(0, 1), single).view(tokens, top_k, -1).sum(1)


class SortedExperts:
    """Experts that run on rows sorted by expert. A token's row is repeated for each of its experts."""

    is_partial = True

    def __init__(self, mlps: SortedMLPs) -> None:
        self.mlps = mlps

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        shape, flat = choice.ids.shape, choice.ids.flatten().long()
        order = flat.argsort(stable=True)  # [tokens * k], by expert
        outs = self.mlps(x[order // shape[1]], flat[order])
        by_token = torch.empty_like(outs).index_copy_(0, order, outs).view(*shape, -1)
        # The order of summation is fixed, so a token's result does not depend on the rest of the batch.
        return (by_token * choice.weights.to(x.dtype).unsqueeze(-1)).sum(1)


class LoopedMLPs:
    """Experts as one product after the other, for a CPU."""

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        make: Callable[[StackedWeight, torch.Tensor | None], Matmul],
    ) -> None:
        """Build the product of each matrix with `make`, from the matrix and its bias."""

        def products(stacked: StackedWeight, bias: torch.Tensor | None) -> list[Matmul]:
            count = stacked.shape[0]
            matrices = (
                stacked if isinstance(stacked, torch.Tensor) else [stacked.expert(i) for i in range(count)]
            )
            biases = [None] * count if bias is None else bias
            return [make(matrix, one) for matrix, one in zip(matrices, biases, strict=True)]

        self.gate_up = products(weights.gate_up, weights.gate_up_bias)
        self.down = products(weights.down, weights.down_bias)
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
# The same for weights that may be quantised.
StackedProduct = Callable[[torch.Tensor, StackedWeight, torch.Tensor], torch.Tensor]


class GroupedMLPs:
    """Experts as two grouped products, which never wait for the device."""

    def __init__(self, weights: ExpertWeights, activation: Activation, product: StackedProduct) -> None:
        self.weights = weights
        self.activation, self.product = activation, product
        self.numbers = torch.arange(weights.down.shape[0], device=weights.down.device)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        ends = torch.searchsorted(ids, self.numbers, right=True).to(torch.int32)
        gate_up = _add_bias(self.product(x, weights.gate_up, ends), weights.gate_up_bias, ids)
        return _add_bias(self.product(self.activation(gate_up), weights.down, ends), weights.down_bias, ids)


def _add_bias(y: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    return y if bias is None else y + bias[ids.clamp(max=len(bias) - 1)]  # behind them: other ranks' experts


def with_quantised(product: GroupedProduct) -> StackedProduct:
    """Return `product` for weights that may be quantised.

    These are unpacked in each call: the matrix of each row's expert if there are few rows, else those of all experts.
    """

    def stacked(x: torch.Tensor, weight: StackedWeight, ends: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return product(x, weight, ends)
        rounded = rounding_of(weight)
        x = x if rounded is None else rounded(x)
        if x.shape[0] > weight.shape[0] // 2:
            return product(x, weight.dequantised(x.dtype), ends)
        # Padding rows may come after the last expert's.
        owner = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
        matrices = weight.expert(owner.clamp_(max=weight.shape[0] - 1)).dequantised(x.dtype)
        return torch.bmm(matrices, x.unsqueeze(-1)).squeeze(-1)

    return stacked


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
