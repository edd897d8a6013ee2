"""The compiled library of CPU kernels, built from the C files here on first use and kept in the user's cache folder.

The library links only libc and libm. It takes OpenMP's entry points from the runtime that torch has loaded, because
two runtimes in one process would both keep threads spinning.
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

_FOLDER = Path(__file__).parent
SOURCES = tuple(_FOLDER / name for name in ("step.c", "attention.c", "quantised.c", "experts.c"))
_HEADERS = tuple(_FOLDER / name for name in ("common.h", "weights.h"))
# No -ffast-math: results must not depend on the compiler's choices, and rows can hold infinities.
FLAGS = ["-O2", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC"]
# Tried in turn: on some architectures clang takes -mcpu instead of -march, and on others neither.
_PROCESSOR_FLAGS: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120
_FOLDERS = ("~/.cache/quire", f"{tempfile.gettempdir()}/quire-{os.getuid() if hasattr(os, 'getuid') else 0}")
_RUNTIME = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def open_library() -> ctypes.CDLL | None:
    """Build the library if necessary and load it. Return None, and log the reason, if that is impossible."""
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
    """Return the OpenMP runtime of this process that has GCC's entry points. Raise OSError if there is none."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[5] for line in maps if "/" in line}
    for path in sorted(loaded):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            runtime = ctypes.CDLL(path)
            if all(hasattr(runtime, name) for name in _RUNTIME):
                return runtime
    raise OSError("torch has loaded no OpenMP runtime with GCC's entry points")


def _compiled() -> Path:
    """Return the shared object for this source, compiler and processor, building it if necessary.

    Raises:
        OSError: if there is no C compiler, or no folder to write to.
        SubprocessError: if the compiler fails.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise OSError("no C compiler is installed (gcc or clang)")
    facts = [
        *(path.read_text() for path in (*_HEADERS, *SOURCES)),
        os.path.realpath(compiler),
        *FLAGS,
        str(_PROCESSOR_FLAGS),
        platform.machine(),
        _processor(),
    ]
    name = f"step-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:24]}.so"
    for folder in _FOLDERS:
        try:
            target = _own(Path(folder).expanduser()) / name
            return target if target.exists() else _compile(compiler, target)
        except (OSError, RuntimeError):  # the folder is not writable, or the user has no home
            continue
    raise OSError(f"cannot write to any of {', '.join(_FOLDERS)}")


def _own(folder: Path) -> Path:
    """Create `folder` if necessary and return it. Raise OSError if other users could put libraries into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} belongs to another user, or other users may write to it")
    return folder


def _compile(compiler: str, target: Path) -> Path:
    handle, half_done = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        _run_compiler(compiler, half_done)
        os.replace(half_done, target)  # atomic, even if another process builds it at the same time
    finally:
        Path(half_done).unlink(missing_ok=True)
    return target


def _run_compiler(compiler: str, output: str) -> None:
    """Compile for this processor, or else for its architecture. Raise SubprocessError or OSError."""
    for flags in _PROCESSOR_FLAGS:
        done = subprocess.run(
            [compiler, *flags, *FLAGS, *map(str, SOURCES), "-o", output, "-lm"],
            capture_output=True, text=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode == 0:
            return
    done.check_returncode()


def _processor() -> str:
    """Return the processor's features, which -march=native depends on: machines may share a home folder."""
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), "")
