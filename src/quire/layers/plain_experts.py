"""Experts without a gate: down(act(up(x))), as in Nemotron-H."""

from __future__ import annotations

from functools import partial

import torch

from quire.layers.activation import ACTIVATIONS
from quire.layers.env import Env
from quire.layers.expert_weights import ExpertWeights, StackedWeight
from quire.layers.moe import (
    Experts,
    GroupedMLPs,
    LoopedMLPs,
    SortedExperts,
    on_a_cpu,
    pick_product,
    with_quantised,
)
from quire.quant.base import Part
from quire.quant.loading import load_stack
from quire.quant.products import any_product


def load_plain_experts(
    env: Env, prefix: str, num_experts: int, hidden: int, width: int, activation: str
) -> Experts:
    """Load experts, stored one by one or stacked, and return their fastest implementation.

    Args:
        env: the weights, and the ranks to shard over.
        prefix: prefix of the tensor names, ending in `experts.`.
        num_experts: number of experts.
        hidden: width of their inputs and outputs.
        width: width of an expert, before sharding.
        activation: key of `ACTIVATIONS`, the function between the projections.
    """
    up, down = (
        _load(env, prefix, name, num_experts, hidden, width, name == "down_proj")
        for name in ("up_proj", "down_proj")
    )
    weights, act = ExpertWeights(up, down), ACTIVATIONS[activation]
    if env.device.type == "cpu":
        looped = LoopedMLPs(weights, act, partial(any_product, env))
        return on_a_cpu(env, looped, SortedExperts(looped), activation, gated=False)
    product = pick_product(env.device, env.dtype, *down.shape[1:])
    return SortedExperts(GroupedMLPs(weights, act, with_quantised(product)))


def _load(
    env: Env, prefix: str, name: str, num_experts: int, hidden: int, width: int, narrows: bool
) -> StackedWeight:
    """Load the projections `name` of all experts, [experts, outputs, inputs]."""
    cut, every = env.parallel.cut(width), slice(None)
    shape, rows, cols = ((hidden, width), every, cut) if narrows else ((width, hidden), cut, every)
    if env.weights.has(f"{prefix}0.{name}.weight") or not env.weights.has(prefix + name):
        names = [f"{prefix}{expert}.{name}.weight" for expert in range(num_experts)]
        return load_stack(env, [[Part(each, shape, rows, cols)] for each in names])
    stored = env.weights.tensor(prefix + name, (num_experts, *shape))[:, rows, cols]
    return stored.to(env.device, env.dtype, memory_format=torch.contiguous_format)
