"""`ExpertWeights`: the weights of a layer's experts as stacked matrices, loaded from either layout of checkpoints.

Checkpoints store each expert's matrices by themselves (Mixtral, Qwen, DeepSeek, GLM), or stacked as one tensor of
three dimensions (gpt-oss, and files written by newer versions of transformers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.target import log_choice
from quire.layers.env import Env
from quire.layers.shared_experts import StackedShared
from quire.quant.base import Part
from quire.quant.forms import QuantisedWeight
from quire.quant.loading import load_stack, open_packed, stacks

# Matrices [experts, outputs, inputs]: plain, or quantised.
StackedWeight = torch.Tensor | QuantisedWeight
# Names of the gate, up and down projections of an expert.
Projections = tuple[str, str, str]
USUAL: Projections = ("gate_proj", "up_proj", "down_proj")
MIXTRAL: Projections = ("w1", "w3", "w2")
STACKED = ("gate_up_proj", "down_proj")  # of all experts, as one tensor each


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts, and their biases if they have any. `width` is that of this rank's part.

    Attributes:
        gate_up: [experts, 2 * width, hidden], the rows of gate before those of up.
        down: [experts, hidden, width].
        gate_up_bias: [experts, 2 * width], or None.
        down_bias: [experts, hidden], or None.
    """

    gate_up: StackedWeight
    down: StackedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def load_experts(
    env: Env,
    prefix: str,
    num_experts: int,
    hidden: int,
    width: int,
    names: Projections = USUAL,
    stacked: tuple[str, str] = STACKED,
    shared: StackedShared | None = None,
) -> ExpertWeights:
    """Load this rank's part of the experts.

    Args:
        env: the weights, and the ranks to shard over.
        prefix: prefix of the tensor names, ending in `experts.`.
        num_experts: number of experts.
        hidden: width of the residual stream.
        width: width of an expert, before sharding.
        names: names of the projections, `{prefix}{number}.{name}.weight` if each expert is stored by itself.
        stacked: names of the tensors of all experts, behind the prefix.
        shared: shared experts, stored like the others, which come behind them; None if there are none.
    """
    gate_up_name, down_name = (prefix + name for name in stacked)
    cut = env.expert_cut(width)
    part = cut.stop - cut.start
    if _is_single(env, prefix, names, gate_up_name):
        return _load_single(env, prefix, num_experts, hidden, width, names, shared)
    if env.quantization and env.quantization.convert:
        log_choice("experts that are stored in one tensor are not converted: they stay plain")
    held = env.experts.held(num_experts)
    own, shape = slice(held.start, held.stop), (num_experts, 2 * width, hidden)
    count = len(held) + (shared.count if shared else 0)
    all_gate_up = torch.empty(count, 2 * part, hidden, device=env.device, dtype=env.dtype)
    all_down = torch.empty(count, hidden, part, device=env.device, dtype=env.dtype)
    gate_up, down = all_gate_up[: len(held)], all_down[: len(held)]
    up_cut = slice(width + cut.start, width + cut.stop)
    env.weights.copy_into(gate_up[:, :part], gate_up_name, shape, own, cut)
    env.weights.copy_into(gate_up[:, part:], gate_up_name, shape, own, up_cut)
    if part == width:
        env.weights.copy_into(down, down_name, (num_experts, hidden, width), own)
    else:  # `copy_into` cannot cut the last of three dimensions
        down.copy_(env.weights.tensor(down_name, (num_experts, hidden, width), own)[..., cut])
    if shared:
        for number, (pair, last) in enumerate(zip(*shared.parts(env, hidden)), len(held)):
            pair[0].copy_into(all_gate_up[number, :part], env)
            pair[1].copy_into(all_gate_up[number, part:], env)
            last[0].copy_into(all_down[number], env)
    return ExpertWeights(all_gate_up, all_down)


def _is_single(env: Env, prefix: str, names: Projections, gate_up_name: str) -> bool:
    """Return whether each expert is stored by itself."""
    return env.weights.has(f"{prefix}0.{names[0]}.weight") or not env.weights.has(gate_up_name)


def stored_alike(
    env: Env,
    prefix: str,
    hidden: int,
    width: int,
    names: Projections,
    stacked: tuple[str, str],
    shared: StackedShared,
) -> bool:
    """Return whether the shared experts are stored in the format of the others; for the arguments see `load_experts`."""
    gate_up, down = shared.parts(env, hidden)
    if not _is_single(env, prefix, names, prefix + stacked[0]):
        return all(open_packed(env, part) is None for parts in (*gate_up, *down) for part in parts)
    first = _parts_of(env, prefix, 0, hidden, width, names)
    return stacks(env, [first[0], *gate_up]) and stacks(env, [first[1], *down])


def _load_single(
    env: Env,
    prefix: str,
    num_experts: int,
    hidden: int,
    width: int,
    names: Projections,
    shared: StackedShared | None = None,
) -> ExpertWeights:
    """Load experts that are stored one by one, in the format that the checkpoint has them in."""
    gate_up, down = [], []
    for expert in env.experts.held(num_experts):
        first, second = _parts_of(env, prefix, expert, hidden, width, names)
        gate_up.append(first)
        down.append(second)
    if shared:
        more_gate_up, more_down = shared.parts(env, hidden)
        gate_up, down = gate_up + more_gate_up, down + more_down
    return ExpertWeights(load_stack(env, gate_up), load_stack(env, down))


def _parts_of(
    env: Env, prefix: str, expert: int, hidden: int, width: int, names: Projections
) -> tuple[list[Part], list[Part]]:
    """Return this rank's parts of gate and up, and of down, of an expert that is stored by itself."""
    cut, every = env.expert_cut(width), slice(None)
    gate_name, up_name, down_name = (f"{prefix}{expert}.{name}.weight" for name in names)
    gate_up = [Part(name, (width, hidden), cut, every) for name in (gate_name, up_name)]
    return gate_up, [Part(down_name, (hidden, width), every, cut)]


def load_transposed_experts(
    env: Env, prefix: str, num_experts: int, hidden: int, width: int
) -> ExpertWeights:
    """Load experts as Llama 4 stores them: stacked, [inputs, outputs], the columns of gate before those of up.

    The arguments are those of `load_experts`, which loads them if each expert is stored by itself.
    """
    if env.weights.has(f"{prefix}0.gate_proj.weight"):
        return load_experts(env, prefix, num_experts, hidden, width)
    cut, weights = env.expert_cut(width), env.weights
    part = cut.stop - cut.start
    held = env.experts.held(num_experts)
    gate_up = torch.empty(len(held), 2 * part, hidden, device=env.device, dtype=env.dtype)
    down = torch.empty(len(held), hidden, part, device=env.device, dtype=env.dtype)
    for place, expert in enumerate(held):  # one at a time, so that only one is in memory twice
        one = slice(expert, expert + 1)
        stored = weights.tensor(prefix + "gate_up_proj", (num_experts, hidden, 2 * width), one)[0].t()
        gate_up[place, :part] = stored[:width][cut]
        gate_up[place, part:] = stored[width:][cut]
        down[place] = weights.tensor(prefix + "down_proj", (num_experts, width, hidden), one, cut)[0].t()
    return ExpertWeights(gate_up, down)


def load_interleaved_experts(
    env: Env, prefix: str, num_experts: int, hidden: int, width: int
) -> ExpertWeights:
    """Load experts as gpt-oss stores them: stacked, [inputs, outputs], rows of gate and up alternating, with biases.

    A GGUF file has the usual projections instead, with biases. The arguments are those of `load_experts`. Ranks sum
    their partial results, so only the first one adds the bias of the down projection, unless each expert is whole on
    one rank.
    """
    cut = env.expert_cut(width)
    weights, experts = env.weights, num_experts
    if weights.has(prefix + "0.gate_proj.bias") and not weights.has(prefix + "gate_up_proj_bias"):
        return _load_single_biased(env, prefix, experts, hidden, width)
    if weights.stored(prefix + "gate_up_proj_blocks"):
        matrices = _load_interleaved_packed(env, prefix, experts, hidden, width)
    else:
        matrices = _load_interleaved_plain(env, prefix, experts, hidden, width)
    held = slice(env.experts.held(experts).start, env.experts.held(experts).stop)
    bias = weights.tensor(prefix + "gate_up_proj_bias", (experts, 2 * width), held)
    gate_up_bias = torch.cat((bias[:, 0::2][:, cut], bias[:, 1::2][:, cut]), 1).to(env.device, env.dtype)
    down_bias = weights.tensor(prefix + "down_proj_bias", (experts, hidden), held).to(env.device, env.dtype)
    adds_bias = env.parallel.rank == 0 or env.experts.exchange is not None
    return ExpertWeights(*matrices, gate_up_bias, down_bias if adds_bias else None)


def _load_single_biased(env: Env, prefix: str, experts: int, hidden: int, width: int) -> ExpertWeights:
    """Load experts that are stored one by one, with a bias of each projection."""
    matrices = _load_single(env, prefix, experts, hidden, width, USUAL)

    def biases(name: str, outputs: int, cut: slice = slice(None)) -> torch.Tensor:
        names = (f"{prefix}{expert}.{name}.bias" for expert in env.experts.held(experts))
        stacked = torch.stack([env.weights.tensor(one, (outputs,), cut) for one in names])
        return stacked.to(env.device, env.dtype)

    cut = env.expert_cut(width)
    gate_up = torch.cat([biases(name, width, cut) for name in USUAL[:2]], 1)
    down = biases(USUAL[2], hidden)
    adds_bias = env.parallel.rank == 0 or env.experts.exchange is not None
    return ExpertWeights(matrices.gate_up, matrices.down, gate_up, down if adds_bias else None)


def _load_interleaved_packed(
    env: Env, prefix: str, experts: int, hidden: int, width: int
) -> tuple[StackedWeight, StackedWeight]:
    """Load gpt-oss's experts in MXFP4, where rows are outputs."""
    cut, every = env.expert_cut(width), slice(None)
    gate_up, down = [], []
    for index in env.experts.held(experts):
        rows = (slice(2 * cut.start + odd, 2 * cut.stop + odd - 1, 2) for odd in (0, 1))
        shape = (2 * width, hidden)
        gate_up.append(
            [Part(prefix + "gate_up_proj", shape, every_other, every, index=index) for every_other in rows]
        )
        down.append([Part(prefix + "down_proj", (hidden, width), every, cut, index=index)])
    return load_stack(env, gate_up), load_stack(env, down)


def _load_interleaved_plain(
    env: Env, prefix: str, experts: int, hidden: int, width: int
) -> tuple[StackedWeight, StackedWeight]:
    """Load gpt-oss's experts as plain numbers, stored [inputs, outputs]."""
    cut, weights = env.expert_cut(width), env.weights
    part = cut.stop - cut.start
    held = env.experts.held(experts)
    gate_up = torch.empty(len(held), 2 * part, hidden, device=env.device, dtype=env.dtype)
    down = torch.empty(len(held), hidden, part, device=env.device, dtype=env.dtype)
    for place, expert in enumerate(held):  # one at a time, so that only one is in memory twice
        one = slice(expert, expert + 1)
        stored = weights.tensor(prefix + "gate_up_proj", (experts, hidden, 2 * width), one)[0].t()
        gate_up[place, :part] = stored[0::2][cut]
        gate_up[place, part:] = stored[1::2][cut]
        down[place] = weights.tensor(prefix + "down_proj", (experts, width, hidden), one, cut)[0].t()
    return gate_up, down
