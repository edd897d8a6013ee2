"""Start of an engine for callers that have not imported torch.

Importing torch takes seconds and keeps the interpreter busy. Other preparations that do not need the interpreter run at
the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
import time
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quire.compilers import NO_COMPILERS, Compilers, start_compilers
from quire.config import EngineConfig
from quire.ranks.group import compiler_count, start_peers
from quire.types import EngineInfo

if TYPE_CHECKING:
    from quire.core.engine import Engine

_DRIVER = "libcuda.so.1"


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
    compilers = compilers_for(config.device, compiler_count(config))  # so do these
    threading.Thread(target=wake_gpu, args=(config.device,), daemon=True).start()
    collecting = gc.isenabled()
    gc.disable()
    try:
        from quire.host import build_engine
    except BaseException:  # such as Ctrl-C
        peers.kill()
        compilers.close()
        raise
    finally:
        gc.freeze()  # objects of modules are never garbage, so the collector may skip them
        if collecting:
            gc.enable()
    with closing(compilers):
        return build_engine(config, time.perf_counter() - begin, peers, secret, exports, compilers)


def compilers_for(device: str, count: int) -> Compilers:
    """Start `count` processes that compile kernels for a rank on `device`, if that may be a GPU."""
    # macOS has no kernels to compile; on Windows a process cannot be forked.
    if sys.platform != "linux" or not _may_have_gpu(device):
        return NO_COMPILERS
    return start_compilers(count)


def wake_gpu(device: str) -> None:
    """Initialize the driver for the GPU that `device` names, and what Triton needs before its first kernel.

    Triton hashes its files (half a gigabyte) before it looks for a kernel on disk, and compiles its interface to the
    driver if that is not on disk either. The results are kept in the process. Errors are ignored here: torch and Triton report them later.
    """
    if not _may_have_gpu(device):
        return
    index = device.partition(":")[2]
    with contextlib.suppress(OSError, ImportError, RuntimeError, subprocess.SubprocessError):
        driver = ctypes.CDLL(_DRIVER)
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), int(index or 0)) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)  # the context that torch will use
            import triton  # noqa: F401 (first: two threads that import parts of it wait for each other)
            from triton.backends.nvidia.driver import CudaUtils
            from triton.runtime.cache import triton_key

            triton_key()
            CudaUtils()


def _may_have_gpu(device: str) -> bool:
    """Return whether `device` may be a GPU: torch is a CUDA build, and there is a driver."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdigit() or not _torch_has_cuda():
        return False
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _torch_has_cuda() -> bool:
    """Return whether the installed torch is a CUDA build, without importing it."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
