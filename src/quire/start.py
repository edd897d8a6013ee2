"""The way to an engine for callers that have not imported torch: `build.py`, reached without idle waiting.

Importing torch takes seconds and keeps the interpreter busy. What else must be done first, and does not
need the interpreter, runs beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.types import EngineInfo

if TYPE_CHECKING:
    from quire.core.engine import Engine


def start_engine(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    """As build.build_engine, which it imports."""
    begin = time.perf_counter()
    threading.Thread(target=wake_gpu, args=(config.device,), daemon=True).start()
    collecting = gc.isenabled()
    gc.disable()
    try:
        from quire.build import build_engine
    finally:
        gc.freeze()  # what modules are made of stays: the collector need not look at it once
        if collecting:
            gc.enable()
    return build_engine(config, time.perf_counter() - begin)


def wake_gpu(device: str) -> None:
    """Prepare the driver for the GPU that `device` names, and Triton, which hashes all of itself (half a
    gigabyte) before it looks for a kernel on disk; both keep what they have done.

    Only a head start: whatever is wrong here is left for torch and Triton to find, and to explain.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdigit() or not _torch_has_cuda():
        return
    with contextlib.suppress(OSError, ImportError):
        driver = ctypes.CDLL("libcuda.so.1")
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), int(index or 0)) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)  # torch's is the same
            from triton.runtime.cache import triton_key

            triton_key()


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, without importing it."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
