"""`replica_config`: the settings of one of several engines."""

from __future__ import annotations

import os
from dataclasses import replace

from quire.config import EngineConfig


def replica_config(config: EngineConfig, replica: int) -> EngineConfig:
    """Return the settings of one replica of `config`: the GPUs behind those of the replicas before it.

    `auto:N` is GPU N, or the CPU where there is no GPU. Ranks of other hosts connect to one port for each replica.
    """
    if config.kv_disk is not None and config.data_parallel_size > 1:  # files of one engine each
        config = replace(config, kv_disk=os.path.join(config.kv_disk, f"replica-{replica}"))
    if config.rank_address is not None:
        host, _, port = config.rank_address.rpartition(":")
        return replace(config, rank_address=f"{host}:{int(port) + replica}")
    kind, _, first = config.device.partition(":")
    gpu = int(first or 0) + replica * config.tensor_parallel_size
    return replace(config, device=f"{kind}:{gpu}") if gpu and kind != "cpu" else config
