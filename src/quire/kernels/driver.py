"""CUDA's driver, called through ctypes: loaded kernels, launches with PDL, and tensor maps of the copy engine.

PyTorch offers no public launch of a loaded cubin, and no tensor maps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

Argument = ctypes.Structure | ctypes.c_uint64 | ctypes.c_int  # of a kernel

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6  # of CUlaunchAttributeID
_DATA_TYPES = {torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}  # of CUtensorMapDataType
_SWIZZLE_128B, _PROMOTE_256B = 3, 3  # of CUtensorMapSwizzle and CUtensorMapL2promotion


class TensorMap(ctypes.Structure):
    """A matrix as the copy engine sees it: CUtensorMap."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


def _attribute(id: int, *values: int) -> _Attribute:
    return _Attribute(id, 0, (ctypes.c_uint32 * 16)(*values))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()}")


def tensor_map(matrix: torch.Tensor, box_rows: int) -> TensorMap:
    """Return the map of a contiguous matrix whose boxes are 128 bytes wide and swizzled.

    Args:
        matrix: [rows, columns], 8 or 16 bits; a row is a multiple of 16 bytes. Rows and columns beyond it read as 0.
        box_rows: rows of a box, at most 256.
    """
    rows, columns = matrix.shape
    size = matrix.element_size()
    dtype = matrix.dtype if size > 1 else torch.uint8
    # The driver writes to an address that is a multiple of 64. ctypes aligns structures only since Python 3.13.
    buffer = ctypes.create_string_buffer(192)
    at = -ctypes.addressof(buffer) % 64 + ctypes.addressof(buffer)
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            _DATA_TYPES[dtype],
            2,
            ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(columns * size),
            (ctypes.c_uint32 * 2)(128 // size, box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            _SWIZZLE_128B,
            _PROMOTE_256B,
            0,
        )
    )
    return TensorMap.from_buffer_copy(buffer, at - ctypes.addressof(buffer))


class LoadedKernel:
    """A kernel of a cubin, loaded onto a device."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int, device: torch.device) -> None:
        context = ctypes.c_void_p()
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0))
        _check(_driver().cuCtxSetCurrent(context))  # a new thread has none
        self._shared_bytes = shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), binary))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        _check(_driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes))

    def launch(
        self,
        blocks: int,
        cluster: int,
        threads: int,
        arguments: Sequence[Argument],
        dependent: bool,
        together: bool = False,
    ) -> None:
        """Launch the kernel on the current stream.

        Args:
            blocks: of the grid, in one dimension.
            cluster: blocks of a cluster.
            threads: of a block.
            arguments: of the kernel, in its order.
            dependent: whether it may start before the previous kernel has ended. It then waits for its results itself.
            together: whether its blocks wait for each other, so that all must run at once or none.
        """
        attributes = [_attribute(_CLUSTER_DIMENSION, cluster, 1, 1)] if cluster > 1 or not together else []
        if together:
            attributes.append(_attribute(_COOPERATIVE, 1))
        if dependent:
            attributes.append(_attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        config = _LaunchConfig(
            (blocks, 1, 1),
            (threads, 1, 1),
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            (_Attribute * len(attributes))(*attributes),
            len(attributes),
        )
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))
