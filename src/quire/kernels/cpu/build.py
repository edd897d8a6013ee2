"""The compiled library: built from step.c by the machine's C compiler when first needed, kept in the user's cache.

Nothing is linked but libc: OpenMP's entry points are taken from the runtime that torch has loaded, since two runtimes
in one process would each keep threads of their own spinning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

log = logging.getLogger("quire")

SOURCE = Path(__file__).with_name("step.c")
# No -ffast-math: results must not depend on what a compiler finds fast, and rows can hold infinities.
_FLAGS = ["-O2", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC"]
# Tried in turn: clang knows this processor by another flag on some architectures, and on others by none.
_PROCESSOR_FLAGS: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120
_FOLDERS = ("~/.cache/quire", f"{tempfile.gettempdir()}/quire-{os.getuid() if hasattr(os, 'getuid') else 0}")
_RUNTIME = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def open_library() -> ctypes.CDLL | None:
    """The library, ready to be called; None, with the reason logged, where it cannot be had."""
    if sys.platform != "linux":
        log.info("no compiled kernels on this CPU: they need Linux, so PyTorch runs every step")
        return None
    try:
        runtime = _openmp()
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no compiled kernels on this CPU, small steps run slower: %s", _reason(error))
        return None
    library.start.restype = None
    library.start(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in _RUNTIME))
    return library


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"the C compiler failed: {error.stderr.strip()[:500]}"
    return str(error)


def _openmp() -> ctypes.CDLL:
    """The OpenMP runtime in this process that GCC's entry points are found in. Raises OSError."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[5] for line in maps if "/" in line}
    for path in sorted(loaded):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            runtime = ctypes.CDLL(path)
            if all(hasattr(runtime, name) for name in _RUNTIME):
                return runtime
    raise OSError("torch has loaded no OpenMP runtime with GCC's entry points")


def _compiled() -> Path:
    """The shared object for this source, compiler and processor. Raises OSError or SubprocessError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise OSError("no C compiler is installed (gcc or clang)")
    facts = [
        SOURCE.read_text(),
        os.path.realpath(compiler),
        *_FLAGS,
        str(_PROCESSOR_FLAGS),
        platform.machine(),
        _processor(),
    ]
    name = f"step-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:24]}.so"
    for folder in _FOLDERS:
        try:
            target = _own(Path(folder).expanduser()) / name
            return target if target.exists() else _compile(compiler, target)
        except (OSError, RuntimeError):  # not ours to write to, or no home at all
            continue
    raise OSError(f"none of {', '.join(_FOLDERS)} can be written to")


def _own(folder: Path) -> Path:
    """`folder`, made if it is not there. Raises OSError if others could put libraries into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} belongs to somebody else, or others may write to it")
    return folder


def _compile(compiler: str, target: Path) -> Path:
    handle, half_done = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        _run_compiler(compiler, half_done)
        os.replace(half_done, target)  # whole or not at all, whoever else is building it
    finally:
        Path(half_done).unlink(missing_ok=True)
    return target


def _run_compiler(compiler: str, output: str) -> None:
    """Compile for this processor, or for any of its architecture. Raises SubprocessError or OSError."""
    for flags in _PROCESSOR_FLAGS:
        done = subprocess.run(
            [compiler, *flags, *_FLAGS, str(SOURCE), "-o", output, "-lm"],
            capture_output=True, text=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode == 0:
            return
    done.check_returncode()


def _processor() -> str:
    """What -march=native goes by: a home folder can be shared by machines of different kinds."""
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), "")
