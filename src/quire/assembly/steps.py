"""The limits of steps, and the ways to launch them, made from settings."""

from __future__ import annotations

import torch

from quire.attention.base import AttentionBackend
from quire.config import EngineConfig
from quire.kernels import Kernels, available
from quire.kernels.cpu.ops import CpuKernels
from quire.worker.launch.launch_factory import GpuLaunch, LaunchFactory, TorchLaunch
from quire.worker.launch.launcher import Threads
from quire.worker.memory.sizing import MemoryPlanner, StepLimits


def step_limits(config: EngineConfig) -> StepLimits:
    """Return the limits of steps and requests. `config` is resolved."""
    return StepLimits(
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        max_model_len=config.max_model_len or 1,
    )


def pick_launch(
    config: EngineConfig,
    memory: MemoryPlanner,
    backend: AttentionBackend,
    kernels: Kernels | None = None,
    *,
    drafts: int = 0,
    depth: int,
) -> LaunchFactory:
    """Return the way in which the worker launches steps.

    Args:
        config: resolved settings.
        memory: sizes of steps, and the device.
        backend: the attention back end.
        kernels: the set that the model's layers use; None is plain PyTorch.
        drafts: most draft tokens of a row.
        depth: steps in flight at once.
    """
    if available(memory.device):
        captures = config.cuda_graphs and backend.capturable
        return GpuLaunch(depth, memory, drafts, captures, config.capture_at_start)
    if memory.device.type != "cpu":
        return TorchLaunch(depth)
    ranks, processes = config.num_ranks, config.num_ranks * config.data_parallel_size
    share = max(1, torch.get_num_threads() // processes) if processes > 1 else None
    threads = Threads(memory.spec.num_parameters, config.cpu_threads or share)
    # A replay contains only calls of kernels, and several ranks also exchange sums.
    captures = config.cpu_replay and ranks == 1
    return TorchLaunch(depth, threads, kernels if captures and isinstance(kernels, CpuKernels) else None)
