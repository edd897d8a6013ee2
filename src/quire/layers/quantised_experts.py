"""Quantised experts in Triton kernels, for a GPU; everything can be captured in a CUDA graph.

Up to 16 tokens read only the packed weights of the chosen experts. A single token uses matrix-vector kernels if these are
FP8, INT8 or MXFP4.
More tokens are grouped by expert. Import this module only if `fuses_experts` returns True.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.experts.few_packed import FEWEST_OUTPUTS, few_packed_down, few_packed_gate_up
from quire.kernels.experts.group import group
from quire.kernels.experts.many import weighted_sum
from quire.kernels.experts.many_packed import many_packed_down, many_packed_gate_up, packed_tiles_for
from quire.kernels.experts.one import ExpertMatrices, one_down, one_gate_up, takes_one
from quire.kernels.matmul.packed import PackedTensors, half_for
from quire.kernels.matmul.round_fp8 import norm_and_round, round_fp8
from quire.kernels.target import target_of
from quire.layers.env import Env
from quire.layers.expert_weights import ExpertWeights, StackedWeight
from quire.layers.moe import RoundingExperts
from quire.quant.forms import FP8_BLOCK, Fp4Weight, Fp8Weight, Int8Weight, IntGroupWeight
from quire.quant.kernel_order import KernelOrder

_HALF = 32  # columns of nibbles that are neighbours; with more, tiles could not be small
_FINE = (16, 32, 64)  # sizes of groups whose scales multiply numbers; larger ones multiply sums


def fused_quantised(env: Env, weights: ExpertWeights, activation: str) -> QuantisedExperts | None:
    """Return the experts as kernels, or None if they do not take these weights.

    Args:
        env: the device.
        weights: the experts, of which at least one matrix is quantised.
        activation: one of those that kernels have.
    """
    if torch.version.hip:  # the kernels contain PTX
        return None
    stacks = [stack_for_kernels(weights.gate_up), stack_for_kernels(weights.down)]
    if stacks[0] is None or stacks[1] is None:
        return None
    experts = QuantisedExperts(weights, stacks[0], stacks[1], activation)
    env.weights.when_loaded(experts.rearrange)
    return experts


def stack_for_kernels(weight: StackedWeight) -> PackedTensors | None:
    """Describe a stack [experts, outputs, inputs] to the kernels; numbers may not be in their order yet.

    Return None for what the kernels do not take: plain numbers, permuted inputs, and sizes that do not fit.
    """
    if isinstance(weight, torch.Tensor) or weight.shape[2] % 32 or weight.shape[1] % 16:
        return None
    inputs = weight.shape[2]
    if isinstance(weight, Fp8Weight):
        size, rows = (FP8_BLOCK, FP8_BLOCK) if weight.by_block else (0, 1)
        return PackedTensors("fp8", weight.weight.view(torch.uint8), inputs, weight.scale, size, rows)
    if isinstance(weight, Int8Weight):
        return PackedTensors("byte", weight.weight.view(torch.uint8), inputs, weight.scale, 0)
    if not isinstance(weight, IntGroupWeight | Fp4Weight):
        return None
    size = weight.group_size
    coarse = size >= FP8_BLOCK and (size % FP8_BLOCK == 0 or size == inputs)
    if not coarse and size not in _FINE:
        return None
    if isinstance(weight, Fp4Weight):
        half = half_for(size, inputs, _HALF)
        return PackedTensors(
            "fp4", weight.packed, inputs, weight.scale, size, factor=weight.global_scale, half=half
        )
    if weight.permutation is not None:
        return None
    if weight.bits == 8:
        return PackedTensors("byte", weight.packed, inputs, weight.scale, size, 1, weight.zero, weight.offset)
    half = half_for(size, inputs, _HALF)
    return PackedTensors(
        "int4", weight.packed, inputs, weight.scale, size, 1, weight.zero, weight.offset, half=half
    )


class QuantisedExperts(RoundingExperts):
    """Quantised experts on a GPU.

    Experts in an FP8 format that rounds its inputs are multiplied in FP8, if there are more than a few tokens. Inputs of
    the first product have a scale per token, or per token and 128 columns for a weight in blocks; those of the second one
    per token and 128 columns, which is at least as fine as what the formats ask for.
    """

    is_partial = True

    def __init__(
        self, weights: ExpertWeights, gate_up: PackedTensors, down: PackedTensors, activation: str
    ) -> None:
        """Keep the matrices of `weights`, as `stack_for_kernels` describes them."""
        self.weights, self.activation = weights, activation
        assert not isinstance(weights.gate_up, torch.Tensor) and not isinstance(weights.down, torch.Tensor)
        self.orders = KernelOrder.of(gate_up, weights.gate_up), KernelOrder.of(down, weights.down)
        self.gate_up, self.down = (order.ordered for order in self.orders)
        self.num_experts, hidden, self.width = weights.down.shape
        device = down.codes.device
        forms = (weights.gate_up, weights.down)
        rounded = all(isinstance(form, Fp8Weight) and form.rounding != "none" for form in forms)
        self.rounds = rounded and target_of(device).capability >= 90
        tiles = -(-hidden // FEWEST_OUTPUTS)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)  # all 0 between launches

    def rearrange(self) -> None:
        """Put codes and scales into the kernels' order, once the checkpoint is there."""
        for order in self.orders:
            order.fill()

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        weights, dtype = self.weights, x.dtype
        if choice.active is not None and len(x) == 1:
            gate_up = matrices_of(self.gate_up, weights.gate_up_bias)
            down = matrices_of(self.down, weights.down_bias)
            if gate_up and down and takes_one(down, choice.ids.shape[1]):
                return one_down(one_gate_up(x, gate_up, choice, self.activation), down, choice)
        if choice.active is not None:
            h = few_packed_gate_up(x, self.gate_up, weights.gate_up_bias, choice, self.activation)
            return few_packed_down(h, self.down, weights.down_bias, choice, self.arrived)
        scales = None
        if self.rounds:
            x, scales, _ = round_fp8(x, self.gate_up.group > 0)
        return self._multiply(x, scales, choice, dtype)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[ExpertChoice], torch.Tensor]]:
        codes, scales, total, normed = norm_and_round(x, residual, norm, eps, self.gate_up.group > 0)
        return normed, total, lambda choice: self._multiply(codes, scales, choice, x.dtype)

    def _multiply(
        self, x: torch.Tensor, scales: torch.Tensor | None, choice: ExpertChoice, dtype: torch.dtype
    ) -> torch.Tensor:
        """Run the experts on many rows; e4m3 rows have scales, as `many_packed_gate_up` takes them."""
        weights = self.weights
        first, second = packed_tiles_for(choice.ids.numel() / self.num_experts, self.rounds)
        grouped = group(choice, self.num_experts, first.rows)
        h, scales = many_packed_gate_up(
            x, scales, self.gate_up, weights.gate_up_bias, grouped, self.activation, first, dtype
        )
        rows = many_packed_down(h, scales, self.down, weights.down_bias, grouped, second, dtype)
        return weighted_sum(rows, grouped.place, choice.weights)


def matrices_of(w: PackedTensors, bias: torch.Tensor | None) -> ExpertMatrices | None:
    """Describe rearranged matrices to the kernels for one token; None if these do not take them."""
    of_rows = w.group == 0 and w.format in ("fp8", "byte")
    of_blocks = w.format == "fp8" and (w.group, w.scale_rows) == (FP8_BLOCK, FP8_BLOCK)
    if w.format == "fp4" and (w.half, w.group) == (32, 32) and w.scale.dtype == torch.uint8:
        return ExpertMatrices(w.codes, w.scale, bias)
    if not (of_rows or of_blocks):
        return None
    if w.format == "fp8" and not target_of(w.codes.device).has_fp8:
        return None
    return ExpertMatrices(
        w.codes.view(torch.float8_e4m3fn if w.format == "fp8" else torch.int8), w.scale, bias
    )
