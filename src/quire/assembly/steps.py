"""The limits of steps, and the ways to launch them, made from settings."""

from __future__ import annotations

import torch

from quire.config import EngineConfig
from quire.worker.memory.sizing import StepLimits
from quire.worker.worker import LaunchOptions


def step_limits(config: EngineConfig) -> StepLimits:
    """Return the limits of steps and requests. `config` is resolved."""
    return StepLimits(
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        max_model_len=config.max_model_len or 1,
    )


def launch_options(config: EngineConfig, depth: int) -> LaunchOptions:
    """Return how the worker launches steps, of which `depth` may be in flight."""
    ranks, processes = config.num_ranks, config.num_ranks * config.data_parallel_size
    return LaunchOptions(
        depth=depth,
        cuda_graphs=config.cuda_graphs,
        capture_at_start=config.capture_at_start,
        cpu_replay=config.cpu_replay and ranks == 1,  # a replay contains only calls of kernels
        cpu_threads=config.cpu_threads
        or (max(1, torch.get_num_threads() // processes) if processes > 1 else None),
    )
