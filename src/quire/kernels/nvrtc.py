"""Compilation of CUDA C++ at run time by NVRTC, which PyTorch brings along, with a cache on disk.

No CUDA toolkit is needed. The result is a cubin for one architecture.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


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
    library = _library()
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


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"NVRTC is missing: none of {', '.join(_LIBRARIES)} can be loaded")


def _compile(library: ctypes.CDLL, source: str, options: tuple[str, ...]) -> bytes:
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"decode_step.cu", 0, None, None),
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
