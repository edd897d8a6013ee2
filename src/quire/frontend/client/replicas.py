"""`ReplicatedClient`: several engine processes as one client, for `LLM` with `data_parallel_size` above 1.

A prompt goes to the engine with the fewest open requests, and its choices to the same one. The server has a router that
knows more (serve/replicas/); a batch of prompts is there at once, so counting is enough. An engine that ends, ends all.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Sequence

from quire.config import EngineConfig
from quire.frontend.client.process import ProcessClient
from quire.frontend.client.replica_config import replica_config
from quire.types import EngineInfo, EngineOutputs, EngineRequest


class ReplicatedClient:
    """An EngineClient over several engine processes. Raises as ProcessClient."""

    def __init__(self, config: EngineConfig) -> None:
        """Start all engines at the same time, and wait until they are ready."""
        count = config.data_parallel_size
        self._clients: list[ProcessClient] = []
        try:
            for number in range(count):
                self._clients.append(ProcessClient(replica_config(config, number), wait=False))
            for client in self._clients:
                self.info: EngineInfo = client.await_ready()
        except BaseException:
            self.close()
            raise
        self._place: dict[str, int] = {}  # of each open request
        self._open = [0] * count
        self._last: tuple[Sequence[int], int] = ([], 0)  # the latest prompt, and where it went

    def add(self, request: EngineRequest) -> None:
        prompt, place = self._last
        if prompt is not request.prompt:  # the choices of a prompt share the list
            place = self._open.index(min(self._open))
            self._last = request.prompt, place
        self._clients[place].add(request)
        self._place[request.id] = place
        self._open[place] += 1

    def abort(self, ids: list[str]) -> None:
        for number, client in enumerate(self._clients):
            if mine := [name for name in ids if self._place.get(name) == number]:
                client.abort(mine)

    def poll(self, timeout_s: float) -> EngineOutputs:
        outputs = self._collect()
        if not outputs:
            select.select(self._clients, [], [], timeout_s)
            outputs = self._collect()
        for output in outputs.ended:
            self._open[self._place.pop(output.id)] -= 1
        return outputs

    def _collect(self) -> EngineOutputs:
        return EngineOutputs([part for client in self._clients for part in client.poll(0.0).parts])

    def close(self) -> None:
        closing: list[Callable[[], None]] = [client.close for client in self._clients]
        with contextlib.ExitStack() as stack:  # all, even if one raises
            for close in closing:
                stack.callback(close)
