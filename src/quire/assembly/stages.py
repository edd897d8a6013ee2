"""The stage of a rank in a pipeline, made from settings: its layers, and its share of the weights."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from quire.config import EngineConfig
from quire.config_rules import parse_layer_split
from quire.models.spec import ModelSpec
from quire.parallel.experts import ALL_EXPERTS, ExpertShard, pick_exchange
from quire.parallel.place import Place
from quire.parallel.ranks import Parallel
from quire.parallel.stage import Stage, split_layers
from quire.types import ConfigError


def pick_place(config: EngineConfig, rank: int) -> Place:
    """Return the place of a rank."""
    return Place(rank, config.tensor_parallel_size, config.pipeline_parallel_size)


def pick_stage(config: EngineConfig, spec: ModelSpec, place: Place) -> Stage:
    """Return the stage at `place`, still without buffers.

    Raises:
        ConfigError: if the model has fewer layers than there are stages, or another number than the split.
    """
    counts = layer_counts(config, spec)
    begin = sum(counts[: place.stage])
    is_last = place.stage == place.stages - 1
    return Stage(place.stage, place.stages, begin, None if is_last else begin + counts[place.stage])


def layer_counts(config: EngineConfig, spec: ModelSpec) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Raises:
        ConfigError: as `pick_stage`.
    """
    stages = config.pipeline_parallel_size
    if stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {stages} needs a layer for each stage, but {config.model} has {spec.num_layers} "
            "layers; lower it"
        )
    if config.pipeline_layer_split is None:
        first, last = _ends(spec)
        return split_layers(spec.layer_parameters, first, last, stages)
    counts = parse_layer_split(config.pipeline_layer_split, stages)
    if sum(counts) != spec.num_layers:
        raise ConfigError(
            f"pipeline_layer_split {config.pipeline_layer_split} has {sum(counts)} layers, but {config.model} has "
            f"{spec.num_layers}"
        )
    return counts


def stage_ranges(config: EngineConfig, spec: ModelSpec, total: int) -> list[range]:
    """Return the layers of each stage, and those behind the model's, up to `total`, that every stage has."""
    ends = [0, *accumulate(layer_counts(config, spec)), total]
    return [range(begin, end) for begin, end in pairwise(ends) if begin < end]


def weight_share(spec: ModelSpec, stage: Stage) -> float:
    """Return the share of a model's weights that a stage holds. The table of a tied model is in two stages."""
    first, last = _ends(spec)
    own = sum(spec.layer_parameters[index] for index in stage.layers(spec.num_layers))
    own += first if stage.is_first else 0
    own += last if stage.is_last and not (stage.is_first and spec.tie_embeddings) else 0
    return own / spec.num_parameters


def _ends(spec: ModelSpec) -> tuple[int, int]:
    """Return the parameters in front of the first layer, and behind the last one."""
    table = spec.vocab_size * spec.hidden_size
    return table + spec.num_positions * spec.hidden_size, table


def with_buffers(
    stage: Stage, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device
) -> Stage:
    """Return the stage with buffers for the states of `tokens` tokens, if it has neighbours."""

    def buffer(needed: bool) -> torch.Tensor:
        # Zeros, because a captured step also computes with the rows behind its last token.
        return torch.zeros((tokens if needed else 0, spec.hidden_size), dtype=dtype, device=device)

    return replace(stage, incoming=buffer(not stage.is_first), outgoing=buffer(not stage.is_last))


def pick_experts(
    config: EngineConfig, spec: ModelSpec, parallel: Parallel, device: torch.device
) -> ExpertShard:
    """Return how experts are divided over ranks.

    Raises:
        ConfigError: if there are none, or fewer than ranks, or if a GPU cannot capture the exchange.
    """
    if not config.enable_expert_parallel:
        return ALL_EXPERTS
    if spec.moe is None:
        raise ConfigError(
            f"enable_expert_parallel needs a model with experts, which {config.model} does not have"
        )
    routing, ranks = spec.moe.routing, parallel.size
    if routing.num_experts < ranks:
        raise ConfigError(
            f"enable_expert_parallel needs an expert for each rank, but {config.model} has {routing.num_experts} experts "
            f"and tensor_parallel_size is {ranks}; lower it"
        )
    captures = device.type == "cuda" and config.cuda_graphs
    if config.expert_exchange == "all-to-all" and captures:
        raise ConfigError(
            "expert_exchange all-to-all has shapes that depend on the routing, which CUDA graphs cannot capture; use "
            "expert_exchange all-reduce, or cuda_graphs off"
        )
    exchange = config.expert_exchange
    if exchange == "auto":
        exchange = pick_exchange(ranks, routing.top_k, captures)
    return ExpertShard(exchange, parallel.rank, ranks, routing.num_experts)


def held_elsewhere(spec: ModelSpec, stage: Stage, experts: ExpertShard) -> re.Pattern[str] | None:
    """Return a pattern of the names of tensors that only other ranks load; None if this rank loads all."""
    patterns = []
    if stage.count > 1:
        own = "|".join(str(index) for index in stage.layers(spec.num_layers))
        # Other layers, and tensors outside of layers, of which each stage loads some.
        patterns.append(rf"^(?!.*\b(?:layers|h|blk)\.(?:{own})\.)")
    if experts.size > 1:
        own = "|".join(str(index) for index in experts.held(experts.total))
        patterns.append(rf"\bexperts\.(?!(?:{own})\.)\d+\.")
    return re.compile("|".join(patterns)) if patterns else None
