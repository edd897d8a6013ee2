# ruff: noqa: E402  (imports that must follow a patch)
"""Kernels within `side_by_side` are compiled in its threads, once each, and none is launched: run by test_ahead.py
in a process of its own, for Hopper, without a GPU (a launch would fail)."""

from __future__ import annotations

from typing import Any

import torch
from targets import TargetDriver
from triton import knobs
from triton.runtime import driver

driver.set_active(TargetDriver(90))
torch.cuda.set_device = lambda device: None

from quire.kernels import norm
from quire.kernels.ahead import side_by_side

compiled: list[str] = []


def note(**launch: Any) -> None:
    compiled.append(launch["fn"].name)


knobs.runtime.jit_post_compile_hook = note
x, weight = torch.ones(3, 1234), torch.ones(1234)
found = []
for _ in range(3):  # when they are compiled they are not launched either
    with side_by_side(torch.device("cpu"), threads=2) as missing:
        for _ in range(3):
            assert not norm.rms_norm(x, weight, 1e-6).any()
            assert not norm.add_rms_norm(x, x, weight, 1e-6)[1].any()
    found.append(len(missing))
    if len(found) == 2:  # forget them, so that they are found on disk
        norm._norm.device_caches.clear()
print(len(compiled), *found)
