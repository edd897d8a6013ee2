"""`RayEngineProcess`: an engine process on a node of a Ray cluster, as the event loop of the server sees it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

from quire.config import EngineConfig
from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import Channel
from quire.frontend.client.remote import RemoteProcess, accept, listen, new_token
from quire.ray.cluster import PlacedRanks, connect_to_ray
from quire.serve.engine_process_client import EngineProcess
from quire.types import EngineDead, EngineInfo

_CONNECT_S = 120.0  # limit on the wait for the process to connect


class RayEngineProcess(EngineProcess):
    """An engine process that Ray places, with the processes of its other ranks."""

    _process: RemoteProcess  # type: ignore[assignment]

    def __init__(
        self, config: EngineConfig, dry_run_step_s: float | None = None, secret: bytes | None = None
    ) -> None:
        """Begin to place the ranks, in a thread."""
        self._start = msg.StartEngine(config, dry_run_step_s, secret)
        self._dead = None
        self._ended, self._news = asyncio.Event(), asyncio.Event()
        self._ranks: PlacedRanks | None = None
        self._error: Exception | None = None
        self._closed = False
        self._launching = threading.Thread(target=self._launch, daemon=True, name="ray-launch")
        self._launching.start()

    @property
    def pid(self) -> int:
        return 0  # it is one of another host

    def cpu_s(self) -> float:
        return time.monotonic()  # unknown, so the process counts as working

    def _launch(self) -> None:
        try:
            ray = connect_to_ray()
            self._ranks = ranks = PlacedRanks(self._start.config)
            token = new_token()
            self._start.config = config = _meeting(self._start.config, ranks, token)
            with listen(ray.util.get_node_ip_address()) as server:
                host, port = server.getsockname()[:2]
                ranks.call(0, "start", ["quire.engine_process", "connect", f"{host}:{port}"], token)
                joined = accept(server, token, _CONNECT_S)
            if joined is None:
                raise EngineDead(f"the engine process has not connected within {_CONNECT_S:g} s")
            end, hello = joined
            self._process, self._channel = RemoteProcess(end, hello), Channel(end)
            device = config.device.partition(":")[0]
            for index in range(1, len(ranks.actors)):
                ranks.call(
                    index, "start", ["quire.rank_process", "connect", str(config.rank_address), device], token
                )
        except Exception as error:
            self._error = error

    async def ready(self) -> EngineInfo:
        await asyncio.to_thread(self._launching.join)
        if self._error is not None:
            raise self._error
        return await super().ready()

    async def close(self, kill: bool = False) -> None:
        if hasattr(self, "_channel"):
            await super().close(kill)
        await asyncio.to_thread(self.kill)

    def end(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()

    def kill(self) -> None:
        """End all processes, and give the room in the cluster back."""
        if self._closed:
            return
        self._closed = True
        self._launching.join()
        if hasattr(self, "_channel"):
            super().kill()
        if self._ranks is not None:
            self._ranks.release()


def _meeting(config: EngineConfig, ranks: PlacedRanks, token: str) -> EngineConfig:
    """Return the settings with the address at which the ranks meet, if there are several."""
    if config.num_ranks == 1:
        return config
    address = f"{ranks.call(0, 'address')}:{ranks.call(0, 'free_port')}"
    return replace(config, rank_address=address, rank_token=token)
