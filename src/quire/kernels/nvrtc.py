"""Compilation of CUDA C++ at run time by NVRTC, which PyTorch brings along, with a cache on disk.

No CUDA toolkit is needed. The result is a cubin for one architecture. NVRTC is a system library, or a part of the Python
packages that a CUDA build of PyTorch requires.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch


def cache_folder() -> Path:
    """Return the folder of compiled kernels, which may not exist yet."""
    return Path("~/.cache/quire/cubin").expanduser()


def compiled(source: str, options: tuple[str, ...], folder: Path | None = None) -> bytes:
    """Return the cubin of `source`, from the cache if it has been compiled before.

    Args:
        source: CUDA C++ without includes.
        options: of NVRTC, with the architecture.
        folder: of the cache; None: `cache_folder`.

    Raises:
        RuntimeError: if NVRTC is missing or refuses the source; contains its messages.
    """
    library = load_library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    version = f"{major.value}.{minor.value}"
    key = hashlib.sha256("\0".join((version, source, *options)).encode()).hexdigest()[:32]
    path = (folder or cache_folder()) / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        binary = _compile(library, source, options)
    try:  # a cache that cannot be written costs time at the next start, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(binary)
        part.replace(path)
    except OSError:
        pass
    return binary


def available() -> bool:
    """Return whether NVRTC can be loaded."""
    try:
        return bool(load_library())
    except RuntimeError:
        return False


@cache
def load_library() -> ctypes.CDLL:
    """Return NVRTC.

    Raises:
        RuntimeError: if it is missing.
    """
    for name in library_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    for path in package_libraries():
        # NVRTC opens its other half by name, which is found if it is loaded already.
        for other in path.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(other), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    raise RuntimeError(
        f"NVRTC is missing: neither {' nor '.join(library_names())} nor a package nvidia-cuda-nvrtc is installed; "
        "reinstall the CUDA build of torch, which requires it"
    )


def library_names() -> tuple[str, ...]:
    """Return the names under which a system has the NVRTC of PyTorch's version of CUDA."""
    major = (torch.version.cuda or "13").partition(".")[0]
    return f"libnvrtc.so.{major}", "libnvrtc.so"


def package_libraries() -> Iterator[Path]:
    """Yield the NVRTC of the Python packages of CUDA, which are not on the system's library path."""
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob(f"*/lib/{library_names()[0]}"))


def _compile(library: ctypes.CDLL, source: str, options: tuple[str, ...]) -> bytes:
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None),
    )
    try:
        encoded = [option.encode() for option in options]
        result = library.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        if result:
            size = ctypes.c_size_t()
            _check(library, library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            text = ctypes.create_string_buffer(size.value)
            _check(library, library.nvrtcGetProgramLog(program, text))
            raise RuntimeError(f"NVRTC: {text.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, binary))
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")
