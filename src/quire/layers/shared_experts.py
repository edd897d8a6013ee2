"""Shared experts as routed ones that every token has chosen, so that the kernels of experts run them too.

The MLP of the shared experts is cut into experts as wide as the routed ones, behind which they are stacked. The router
adds them to each token's choice, with the weight 1 or the sigmoid of their gate. That saves five kernels of a layer, and
on several ranks one sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.activation import FUSED_ACTIVATIONS
from quire.layers.env import Env, unobserved
from quire.layers.routing import fuses_experts
from quire.layers.routing_params import Routing
from quire.quant.base import Part
from quire.quant.loading import open_packed

# Kernels pad the number of experts to a power of two, and were not tried with a larger one.
_MOST_EXPERTS = 1024
# Names of the projections of the MLP.
_GATE, _UP, _DOWN = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class StackedShared:
    """Shared experts that are stacked behind the routed ones.

    Attributes:
        prefix: prefix of the MLP's tensors.
        count: number of experts that the MLP is cut into.
        width: width of each, before sharding.
        gate: name of the gate, or None: the experts count in full.
    """

    prefix: str
    count: int
    width: int
    gate: str | None

    def parts(self, env: Env, hidden: int) -> tuple[list[list[Part]], list[list[Part]]]:
        """Return this rank's parts of gate and up, and of down, for each expert."""
        total, every = self.count * self.width, slice(None)
        cut = env.parallel.cut(total)
        size = (cut.stop - cut.start) // self.count
        gate_up, down = [], []
        for first in range(cut.start, cut.start + self.count * size, size):
            own = slice(first, first + size)
            names = (f"{self.prefix}{name}.weight" for name in (_GATE, _UP))
            gate_up.append([Part(name, (total, hidden), own, every) for name in names])
            down.append([Part(f"{self.prefix}{_DOWN}.weight", (hidden, total), every, own)])
        return gate_up, down

    def copy_gate(self, env: Env, row: torch.Tensor) -> None:
        """Load the gate into `row` [1, hidden]."""
        env.weights.copy_into(row, f"{self.gate}.weight", (1, row.shape[1]))


def stack_shared(
    env: Env,
    prefix: str,
    hidden: int,
    shared_size: int,
    width: int,
    routing: Routing,
    activation: str,
    gate: str | None,
) -> StackedShared | None:
    """Return how the shared experts are stacked behind the routed ones; None if they cannot be.

    They have to be a multiple of an expert's `width`, and not too many with the routed ones, on a device whose kernels run the experts. Whether the two are
    stored alike shows when they are loaded.

    Args:
        env: the device, and the ranks.
        prefix: prefix of the tensors of the shared experts' MLP.
        hidden: width of the residual stream.
        shared_size: width of that MLP.
        width: width of a routed expert.
        routing: the rule of the router.
        activation: of all experts.
        gate: name of the gate, or None.
    """
    if not shared_size or shared_size % width or routing.scores == "sparsemixer":
        return None
    if routing.num_experts + shared_size // width > _MOST_EXPERTS:
        return None
    if (
        env.experts.exchange is not None
        or env.observe is not unobserved
        or activation not in FUSED_ACTIVATIONS
    ):
        return None
    part = env.expert_cut(width)
    if (part.stop - part.start) * env.parallel.size != width or not fuses_experts(env.device, env.dtype):
        return None
    if gate is not None and open_packed(env, _row(gate, hidden)) is not None:
        return None
    return StackedShared(prefix, shared_size // width, width, gate)


def _row(name: str, hidden: int) -> Part:
    return Part(f"{name}.weight", (1, hidden), slice(None), slice(None))
