"""The meeting of ranks, and the choice of their communicators and links."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quire.kernels import available
from quire.parallel.communicator import ALONE, Communicator, GroupCommunicator
from quire.parallel.pipeline import NO_LINK, GroupLink, Link
from quire.parallel.place import Place
from quire.parallel.stage import Stage
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


class Meeting:
    """The process groups of a rank: by gloo on CPUs, by NCCL on GPUs. All ranks call the methods in the same order.

    Args:
        port: of the store at which the ranks meet.
        place: this rank's place.
        device: of this rank.
        timeout_s: longest wait for another rank.
        hosts: where the ranks are.

    Raises:
        ConfigError: if this process is already connected to ranks on GPUs.
    """

    def __init__(
        self, port: int, place: Place, device: torch.device, timeout_s: float, hosts: HostAddresses
    ) -> None:
        self._place, self._device, self._limit = place, device, timedelta(seconds=timeout_s)
        self._hosts = hosts
        self._store = dist.TCPStore(
            hosts.meeting, port, place.count, is_master=False, wait_for_workers=False, timeout=self._limit
        )
        if device.type == "cpu":
            return
        if dist.is_initialized():
            raise ConfigError(
                "one process can hold one engine with several GPUs; use a process for each, such as engine_process=True"
            )
        dist.init_process_group(
            "nccl",
            store=self._store,
            rank=place.rank,
            world_size=place.count,
            timeout=self._limit,
            device_id=device,
        )

    def communicator(self) -> Communicator:
        """Return the connection to the ranks that share this rank's layers."""
        place = self._place
        if place.size == 1:
            return ALONE
        group = self._group("tensor", [place.tensor_group(stage) for stage in range(place.stages)])
        if not (self._hosts.one_host and available(self._device)):  # other hosts have no common memory
            return GroupCommunicator(group)
        from quire.parallel.symmetric import symmetric_or  # deferred, because it imports triton

        return symmetric_or(GroupCommunicator(group), group, self._device)

    def link(self, stage: Stage, depth: int) -> Link:
        """Return the connection to the other stages of a pipeline in which `depth` steps may be in flight."""
        place = self._place
        if place.stages == 1:
            return NO_LINK
        columns = [place.column(shard) for shard in range(place.size)]
        return GroupLink(stage, self._group("states", columns), self._group("tokens", columns), depth)

    def _group(self, name: str, parts: list[list[int]]) -> dist.ProcessGroup:
        """Return the group of this rank, after all ranks have been divided into `parts`."""
        mine = next(part for part in parts if self._place.rank in part)
        if self._device.type == "cpu":
            store = dist.PrefixStore(f"{name}-{mine[0]}", self._store)
            return _gloo_group(store, mine.index(self._place.rank), len(mine), self._limit, self._hosts.own)
        if len(parts) == 1 and name == "tensor" and dist.group.WORLD is not None:
            return dist.group.WORLD
        # Every rank takes part in the making of all groups.
        made = [dist.new_group(part, timeout=self._limit) for part in parts]
        return made[parts.index(mine)]


def _gloo_group(store: dist.Store, rank: int, size: int, limit: timedelta, own: str) -> Any:
    group: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = group._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = limit
    return group(store, rank, size, options)
