"""Placement of the processes of an engine on the nodes of a Ray cluster.

An engine gets a placement group with one bundle per rank, packed onto as few nodes as possible. In each bundle an actor
starts the process of its rank, which talks to the others over TCP (frontend/client/remote.py), not through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from typing import Any

from quire.config import EngineConfig
from quire.types import ConfigError

_PLACE_S = 120.0  # limit on the wait for room in the cluster
_STOP_S = 5.0
_connecting = threading.Lock()


def connect_to_ray() -> Any:
    """Connect this process to the Ray cluster of RAY_ADDRESS or of this host, once, and return the module `ray`.

    Raises:
        ConfigError: if Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed: pip install 'quire-llm[ray]'") from None
    with _connecting:
        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                text = str(error).split("\n")[0]
                raise ConfigError(
                    f"no Ray cluster found: start one with `ray start --head`, or set RAY_ADDRESS ({text})"
                ) from None
    return ray


class RankHost:
    """An actor that starts and stops the process of one rank on its node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def address(self) -> str:
        """Return the address of this node."""
        import ray.util

        return str(ray.util.get_node_ip_address())

    def free_port(self) -> int:
        """Return a port at which nothing listens."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, arguments: list[str], token: str) -> None:
        """Start `python -m` with these arguments, and hand it the token on standard input."""
        command = [sys.executable, "-m", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{token}\n")
        self._process.stdin.close()

    def stop(self) -> None:
        """End the process, if it has not ended."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
            self._process.wait()


class PlacedRanks:
    """The actors of an engine's ranks, in a placement group.

    Raises:
        ConfigError: if the cluster has no room for them.
    """

    def __init__(self, config: EngineConfig) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray = connect_to_ray()
        count = config.num_ranks
        needs = _bundle(config, ray.cluster_resources())
        self._group = placement_group([needs] * count, strategy="PACK")
        if not self._group.wait(_PLACE_S):
            self.release()
            free = {name: ray.available_resources().get(name, 0.0) for name in needs}
            raise ConfigError(
                f"the Ray cluster has no room for {count} ranks with {needs} each within {_PLACE_S:g} s; {free} are "
                "free: add nodes or lower tensor_parallel_size or data_parallel_size"
            )
        actor = ray.remote(RankHost)
        self.actors = [
            actor.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(count)
        ]

    def call(self, index: int, method: str, *arguments: Any) -> Any:
        """Return the result of a method of the actor of one rank."""
        return self._ray.get(getattr(self.actors[index], method).remote(*arguments))

    def release(self) -> None:
        """End all processes and give the room in the cluster back."""
        from ray.util.placement_group import remove_placement_group

        actors = getattr(self, "actors", [])
        with contextlib.suppress(Exception):  # of nodes that are gone
            self._ray.get([actor.stop.remote() for actor in actors], timeout=2 * _STOP_S)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)


def _bundle(config: EngineConfig, resources: dict[str, float]) -> dict[str, float]:
    """Return what a rank needs: a core, and a GPU if there are any and the settings do not say otherwise."""
    on_gpu = config.device != "cpu" and (config.device != "auto" or resources.get("GPU", 0.0) > 0)
    return {"CPU": 1.0, "GPU": 1.0} if on_gpu else {"CPU": 1.0}
