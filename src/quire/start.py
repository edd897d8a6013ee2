"""Start of an engine for callers that have not imported torch.

Importing torch takes seconds and keeps the interpreter busy. Other preparations that do not need the interpreter run at
the same time.
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
from quire.ranks.group import start_peers
from quire.types import EngineInfo

if TYPE_CHECKING:
    from quire.core.engine import Engine


def start_engine(
    config: EngineConfig, secret: bytes | None = None, exports: int | None = None
) -> tuple[Engine, EngineInfo]:
    """Import `host.build_engine` and return its result, while the GPU driver starts in a thread.

    Args:
        config: settings.
        secret: key of the names of KV blocks, which engines of one deployment share; None picks one.
        exports: descriptor of the memory in which a prefill engine shows its blocks; None for other engines.

    Raises:
        ConfigError: if the settings do not suit the model or the machine.
        ModelError: if the model cannot be found or read.
    """
    begin = time.perf_counter()
    peers = start_peers(config)  # they import torch at the same time
    threading.Thread(target=wake_gpu, args=(config.device,), daemon=True).start()
    collecting = gc.isenabled()
    gc.disable()
    try:
        from quire.host import build_engine
    except BaseException:  # such as Ctrl-C
        peers.kill()
        raise
    finally:
        gc.freeze()  # objects of modules are never garbage, so the collector may skip them
        if collecting:
            gc.enable()
    return build_engine(config, time.perf_counter() - begin, peers, secret, exports)


def wake_gpu(device: str) -> None:
    """Initialize the driver for the GPU that `device` names, and Triton's key of its kernel cache.

    Triton hashes its files (half a gigabyte) before it looks for a kernel on disk. Both results are kept in
    the process. Errors are ignored here: torch and Triton report them later.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdigit() or not _torch_has_cuda():
        return
    with contextlib.suppress(OSError, ImportError):
        driver = ctypes.CDLL("libcuda.so.1")
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), int(index or 0)) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)  # the context that torch will use
            from triton.runtime.cache import triton_key

            triton_key()


def _torch_has_cuda() -> bool:
    """Return whether the installed torch is a CUDA build, without importing it."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
