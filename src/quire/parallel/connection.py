"""The meeting of ranks, and the choice of their communicator."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quire.kernels import available
from quire.parallel.communicator import Communicator, GroupCommunicator
from quire.parallel.ranks import Parallel
from quire.types import ConfigError


@dataclass(frozen=True, slots=True)
class HostAddresses:
    """Where ranks meet, as this rank sees it."""

    meeting: str = "127.0.0.1"  # host of the first rank
    own: str = "127.0.0.1"  # this host, as the others reach it
    one_host: bool = True  # all ranks are on one host


def open_store(size: int, host: str) -> dist.TCPStore:
    """Open the store at which `size` ranks meet, on a free port of `host`."""
    return dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)


def connect_ranks(
    port: int, parallel: Parallel, device: torch.device, timeout_s: float, hosts: HostAddresses
) -> Communicator:
    """Connect this rank to the others: by gloo on CPUs, by NCCL on GPUs.

    Args:
        port: of the store at which the ranks meet.
        parallel: this rank's place.
        device: of this rank.
        timeout_s: longest wait for another rank.
        hosts: where the ranks are.

    Raises:
        ConfigError: if this process is already connected to ranks on GPUs.
    """
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        hosts.meeting, port, parallel.size, is_master=False, wait_for_workers=False, timeout=limit
    )
    if device.type == "cpu":
        return GroupCommunicator(_gloo_group(store, parallel, limit, hosts.own))
    if dist.is_initialized():
        raise ConfigError(
            "one process can hold one engine with several GPUs; use a process for each, such as engine_process=True"
        )
    dist.init_process_group(
        "nccl", store=store, rank=parallel.rank, world_size=parallel.size, timeout=limit, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    if not (hosts.one_host and available(device)):  # other hosts have no common memory
        return GroupCommunicator(group)
    from quire.parallel.symmetric import symmetric_or  # deferred, because it imports triton

    return symmetric_or(GroupCommunicator(group), group, device)


def _gloo_group(store: dist.Store, parallel: Parallel, limit: timedelta, own: str) -> Any:
    group: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = group._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = limit
    return group(store, parallel.rank, parallel.size, options)
