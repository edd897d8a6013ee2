"""The start of the prefill engines of a decode engine."""

from __future__ import annotations

from dataclasses import replace

from quire.config import EngineConfig
from quire.disaggregation.prefill_processes import PeerListener, PrefillProcesses
from quire.types import SharedBlocks


class Prefills:
    """Prefill engines that start while the decode engine does, and the memory that they show."""

    def __init__(self, config: EngineConfig, secret: bytes) -> None:
        one = replace(config, disaggregate=None, data_parallel_size=1, spec_method="off", spec_model=None)
        one = replace(one, spec_tokens=None, skip_tokenizer_init=True)
        self._early: dict[int, tuple[int, SharedBlocks | None]] = {}
        self.processes = PrefillProcesses([one] * config.num_prefills, secret, self)

    def add_peer(self, number: int, memory: int, shared: SharedBlocks | None) -> None:
        """Keep what is known of an engine until `report_to`."""
        self._early[number] = memory, shared

    def drop_peer(self, number: int) -> None:
        """Forget an engine."""
        self._early.pop(number, None)

    def report_to(self, listener: PeerListener) -> None:
        """Tell `listener` of each engine that is up, and of all changes from now on."""
        self.processes.listener = listener
        for number, (memory, shared) in self._early.items():
            listener.add_peer(number, memory, shared)

    def close(self) -> None:
        """End the processes."""
        self.processes.close()


def start_prefills(config: EngineConfig, secret: bytes) -> Prefills | None:
    """Start the prefill engines of a decode engine, without waiting for them. None without disaggregation."""
    return Prefills(config, secret) if config.num_prefills else None
