"""The functions of step.c under the names and arguments of the Triton kernels, and what only a CPU has: the product
with a packed weight, and attention for rows of one token.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

KINDS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
LANES = 16
_MOST_PADDING = 64  # inputs
_SAMPLES = 8  # blocks of a weight whose place in memory is checked
_P, _N, _I = c_void_p, c_int64, c_int32


class Norm(ctypes.Structure):
    _fields_ = [("weight", _P), ("bias", _P), ("eps", c_float), ("half", _I)]


class Heads(ctypes.Structure):
    _fields_ = [
        ("norms", _P), ("table", _P),
        ("heads", _N), ("kv_heads", _N), ("dim", _N), ("window", _N),
        ("scale", c_float), ("cap", c_float), ("half", _I),
    ]  # fmt: skip


class Weight(ctypes.Structure):
    _fields_ = [
        ("packed", _P), ("bias", _P), ("norm", _P), ("inputs", _N), ("padded", _N), ("outputs", _N),
        ("vectors", _I), ("half", _I), ("kind", _I),
    ]  # fmt: skip


_ARGUMENTS = {
    "norm_rows": [_P, _P, _P, _N, _N, _P, _P, _I],
    "gate_rows": [_P, _N, _N, _P, _I, _I],
    "turn_rows": [_P, _P, _P, _N],
    "attend_rows": [_P, _P, _P, _P, _P, _P, _N, _N, _N, _P, _P, _P],
    "product": [_P, _P, _N, _P, _P, _P, _P],
}


def half(x: torch.Tensor) -> int:
    assert x.dtype in (torch.bfloat16, torch.float32)
    return int(x.dtype == torch.bfloat16)


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def checked(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the working space of a step")


def norm_struct(weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Norm:
    return Norm(weight.data_ptr(), pointer(bias), eps, half(weight))


class CpuKernels:
    """Tensors are contiguous and in one dtype, fp32 or bf16; the weight of a norm may be in the other."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
        self._library = library
        self.product = library.product
        self.attend_rows = library.attend_rows

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, norm_struct(weight, None, eps))[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, norm_struct(weight, None, eps))

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(x, None, norm_struct(weight, bias, eps))[0]

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, norm_struct(weight, bias, eps))

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, width = x.contiguous(), x.shape[-1]
        residual = None if residual is None else residual.contiguous()
        normed = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        checked(
            self._library.norm_rows(
                ctypes.addressof(norm), x.data_ptr(), pointer(residual), x.numel() // width, width,
                total.data_ptr(), normed.data_ptr(), half(x),
            )
        )  # fmt: skip
        return normed, total

    def gated(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._library.gate_rows(gate_up.data_ptr(), rows, width, out.data_ptr(), half(gate_up), KINDS[kind])
        return out

    def norm_rotate_(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        turned: int,
    ) -> None:
        assert qkv.is_contiguous() and table.dtype == qkv.dtype
        dim = table.shape[1]
        values = (
            qkv.shape[1] // dim - turned
        )  # heads that stay as they are, of which there are as many as of k
        norm = None if weight is None else norm_struct(weight, None, eps)
        heads = Heads(
            None if norm is None else ctypes.addressof(norm), table.data_ptr(),
            turned - values, values, dim, 0, 0.0, 0.0, half(qkv),
        )  # fmt: skip
        checked(
            self._library.turn_rows(
                ctypes.addressof(heads), qkv.data_ptr(), positions.data_ptr(), qkv.shape[0]
            )
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """Where oneDNN keeps a packed weight, in the form that step.c reads: [outputs / block, inputs / v, block, v]."""

    address: int
    vectors: int  # of 16 outputs in a block
    padded: int  # inputs, zeros included


def find_packed(packed: torch.Tensor, weight: torch.Tensor) -> Packed | None:
    """How `packed`, oneDNN's form of `weight` [outputs, inputs], lies in memory; None if that is not clear.

    Nothing promises a form, so some blocks of each possible one are compared with the weight itself.
    """
    found = [form for vectors in (1, 2, 3, 4) if (form := _try(packed, weight, vectors))]
    return found[0] if len(found) == 1 else None


def _try(packed: torch.Tensor, weight: torch.Tensor, vectors: int) -> Packed | None:
    (outputs, inputs), size, block = weight.shape, weight.element_size(), vectors * LANES
    integer, kind, v = (torch.int16, ctypes.c_int16, 2) if size == 2 else (torch.int32, ctypes.c_int32, 1)
    elements, blocks = torch.ops.mkldnn._nbytes(packed) // size, -(-outputs // block)
    padded, rest = divmod(elements, blocks * block)
    if rest or padded % v or not inputs <= padded < inputs + _MOST_PADDING:
        return None
    address = torch.ops.mkldnn.data_ptr(packed)
    memory = torch.frombuffer((kind * elements).from_address(address), dtype=integer)
    lying = memory.view(blocks, padded // v, block, v)
    for i in {blocks * part // _SAMPLES for part in range(_SAMPLES)} | {blocks - 1}:
        rows = weight[i * block : (i + 1) * block].view(integer)
        whole = rows.new_zeros(block, padded)
        whole[: rows.shape[0], :inputs] = rows
        if not torch.equal(lying[i], whole.view(block, -1, v).transpose(0, 1)):
            return None
    return Packed(address, vectors, padded)
