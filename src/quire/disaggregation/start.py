"""The start of the prefill engines of a decode engine."""

from __future__ import annotations

from dataclasses import replace

from quire.config import EngineConfig
from quire.disaggregation.prefill_processes import OnReady, PrefillProcesses
from quire.types import EngineInfo


class Prefills:
    """Prefill engines that start while the decode engine does, and the memory that they show."""

    def __init__(self, config: EngineConfig, secret: bytes) -> None:
        one = replace(config, disaggregate=None, data_parallel_size=1, spec_method="off", spec_model=None)
        one = replace(one, spec_tokens=None, skip_tokenizer_init=True)
        self._on_ready: OnReady = self._note
        self._early: list[tuple[int, int, EngineInfo]] = []
        self.processes = PrefillProcesses(
            [one] * config.num_prefills, secret, lambda *up: self._on_ready(*up)
        )

    def _note(self, number: int, memory: int, info: EngineInfo) -> None:
        self._early.append((number, memory, info))

    def report_to(self, on_ready: OnReady) -> None:
        """Call `on_ready` for each engine that is up, and for each that will be."""
        self._on_ready = on_ready
        for up in self._early:
            on_ready(*up)

    def close(self) -> None:
        """End the processes."""
        self.processes.close()


def start_prefills(config: EngineConfig, secret: bytes) -> Prefills | None:
    """Start the prefill engines of a decode engine, without waiting for them. None without disaggregation."""
    return Prefills(config, secret) if config.num_prefills else None
