"""The device of an engine is the current device in every executor call, in any thread, and nowhere else."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import quire.rank
from quire.config import EngineConfig
from quire.host import build_engine
from quire.types import Executor
from quire.worker.executor import LocalExecutor, device_guard
from quire.worker.worker import Worker

METHODS = sorted(name for name, _ in inspect.getmembers(Executor, inspect.isfunction) if name[0] != "_")


class ThreadDevice:
    """A device that is current per thread, as CUDA devices are."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def is_current(self) -> bool:
        return getattr(self._thread, "current", False)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        before, self._thread.current = self.is_current, True
        try:
            yield
        finally:
            self._thread.current = before


class StandIn:
    """Runner that notes whether its device is current when a method is called and when it is freed."""

    def __init__(self, device: ThreadDevice, seen: dict[str, bool]) -> None:
        self._device, self._seen = device, seen

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._seen.update({name: self._device.is_current})

    def __del__(self) -> None:
        self._seen["close"] = self._device.is_current


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_the_device_in_any_thread(method: str) -> None:
    device, seen = ThreadDevice(), dict[str, bool]()
    executor = LocalExecutor(StandIn(device, seen), device.guard)  # type: ignore[arg-type]
    call = getattr(executor, method)
    arguments = [None] * len(inspect.signature(call).parameters)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, *arguments).result()
        assert seen[method]
        assert not pool.submit(lambda: device.is_current).result()


def test_an_engine_is_built_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = ThreadDevice(), dict[str, bool]()
    allocate = Worker.allocate

    def note(self: Worker, *args: Any) -> Any:
        seen["allocate"] = device.is_current
        return allocate(self, *args)

    monkeypatch.setattr(quire.rank, "device_guard", lambda _: device.guard)
    monkeypatch.setattr(Worker, "allocate", note)
    engine, _ = build_engine(EngineConfig(device="cpu", kv_cache_memory=1 << 24, skip_tokenizer_init=True))
    engine.close()
    assert seen["allocate"] and not device.is_current


def test_the_guard_of_a_cpu_does_nothing() -> None:
    assert isinstance(device_guard(torch.device("cpu"))(), contextlib.nullcontext)
    assert isinstance(device_guard(torch.device("cuda:1"))(), torch.cuda.device)
