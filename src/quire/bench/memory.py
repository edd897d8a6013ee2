"""The use of the device's memory: weights, KV blocks, activations, captured graphs, and free memory."""

from __future__ import annotations

import psutil
import torch

from quire.types import EngineInfo
from quire.worker.memory.sizing import free_memory


def memory_map(info: EngineInfo) -> dict[str, int]:
    """Return bytes by use, which add up to the device's total memory.

    Call it after some steps, because activations are their peak. On a CPU a block takes memory when it is first
    written, so blocks are counted as memory of the process.
    """
    device = torch.device(info.device)
    free, total = free_memory(device)
    if device.type != "cuda":
        process = psutil.Process().memory_info().rss
        return {
            "weights": info.weight_bytes,
            "draft weights": info.draft_weight_bytes,
            "KV blocks written, and the rest": process - info.weight_bytes - info.draft_weight_bytes,
            "other processes": total - free - process,
            "free": free,
        }
    blocks = (info.num_blocks + 1) * info.block_bytes  # the last one is the dummy slot's
    states = (info.max_num_seqs * info.states_per_request + 1 + info.num_snapshots) * info.state_bytes
    graphs = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    )
    reserved = torch.cuda.memory_reserved(device)
    rest = reserved - info.weight_bytes - info.draft_weight_bytes - blocks - states - graphs
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    activations = max(min(peak, rest), 0)
    return {
        "weights": info.weight_bytes,
        "draft weights": info.draft_weight_bytes,
        "KV blocks": blocks,
        "states": states,
        "graphs": graphs,
        "activations": activations,
        "columns, tables, allocator": rest - activations,
        "CUDA context, other processes": total - free - reserved,
        "free": free,
    }
