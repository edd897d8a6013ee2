"""The planner of a rank's memory, made from settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quire.assembly.drafting import DraftSource
from quire.assembly.stages import stage_ranges, weight_share
from quire.assembly.steps import step_limits
from quire.config import EngineConfig
from quire.models.checkpoint.sizes import weight_bytes
from quire.models.spec import ModelSpec
from quire.parallel.stage import WHOLE, Stage
from quire.types import StateLayout
from quire.worker.memory.kv_groups import choose_groups, held_by
from quire.worker.memory.sizing import BlockLayout, MemoryPlanner


def request_state_bytes(spec: ModelSpec, dtype: torch.dtype, ranks: int) -> int:
    """Return the bytes that the layers keep of a request, besides KV entries, on one of `ranks` ranks."""
    name = str(dtype).removeprefix("torch.")
    return sum(layout.num_bytes for layout in spec.state_layouts(name, ranks))


def memory_planner(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    explicit_len: bool,
    stage: Stage = WHOLE,
    drafts: Sequence[DraftSource] = (),
    shares_gpu: bool = False,
) -> MemoryPlanner:
    """Return the planner that divides the memory of `device`.

    Args:
        config: resolved settings.
        path: folder or file of the model.
        spec: the spec that is served.
        dtype: of plain weights, activations and KV entries.
        explicit_len: the user set max_model_len, so a context that does not fit is an error.
        stage: the layers that this rank holds.
        drafts: networks that draft, whose layers follow those of the model in its blocks.
        shares_gpu: other engines of this deployment start on the same GPU.
    """
    limits = step_limits(config)
    layout = BlockLayout(
        paged_size=config.block_size if config.kv_layout == "paged" else None,
        keeps_kv=config.kv_layout != "none",
    )
    name, ranks = str(dtype).removeprefix("torch."), config.tensor_parallel_size
    layouts = spec.kv_layouts(name, ranks)
    layouts += tuple(layout for draft in drafts for layout in draft.kv_layouts(name, ranks))
    groups = choose_groups(
        layouts,
        limits.max_model_len,
        paged=layout.paged,
        keeps_kv=layout.keeps_kv,
        stages=() if stage.count == 1 else stage_ranges(config, spec, len(layouts)),
    )
    own = stage.layers(spec.num_layers)
    states = enumerate(spec.state_layouts(name, ranks))
    return MemoryPlanner(
        model=config.model,
        spec=spec,
        weight_bytes=weight_bytes(path, spec, dtype, device, config.cpu_kernels),
        draft_bytes=sum(draft.weight_bytes(dtype, device, config.cpu_kernels, ranks) for draft in drafts),
        dtype=dtype,
        device=device,
        groups=held_by(groups, {*own, *range(spec.num_layers, len(layouts))}),
        states=tuple(state if index in own else StateLayout(()) for index, state in states),
        ranks=config.num_ranks,
        held=weight_share(spec, stage) / ranks,
        limits=limits,
        layout=layout,
        explicit_len=explicit_len,
        kv_cache_memory=config.kv_cache_memory,
        shares_gpu=shares_gpu,
        # Replicas on a CPU share its memory; on GPUs each has its own.
        memory_utilization=config.memory_utilization
        / (config.data_parallel_size if device.type == "cpu" else 1),
        states_per_slot=1 + (config.spec_tokens or 0),
        snapshots=config.state_snapshots if config.prefix_caching else 0,
    )
