"""The functions of step.c under the names and arguments of the Triton kernels, and what only a CPU has: the product
with a packed weight, attention for rows of one token, and calls that are recorded to be made again.

Each function of step.c takes the address of one structure, which here has the same fields and the same name behind a C.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Protocol, TypeVar

import torch

KINDS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
LANES = 16
_MOST_PADDING = 64  # inputs
_SAMPLES = 8  # blocks of a weight whose place in memory is checked
_P, _N, _I = c_void_p, c_int64, c_int32

T = TypeVar("T")
_NO_SPAN = nullcontext()


class CNorm(ctypes.Structure):
    _fields_ = [("weight", _P), ("bias", _P), ("eps", c_float), ("half", _I)]


class CHeads(ctypes.Structure):
    _fields_ = [
        ("norms", _P), ("table", _P),
        ("heads", _N), ("kv_heads", _N), ("dim", _N), ("window", _N),
        ("scale", c_float), ("cap", c_float), ("half", _I),
    ]  # fmt: skip


class CWeight(ctypes.Structure):
    _fields_ = [
        ("packed", _P), ("bias", _P), ("norm", _P), ("inputs", _N), ("padded", _N), ("outputs", _N),
        ("vectors", _I), ("half", _I), ("kind", _I),
    ]  # fmt: skip


class CRows(ctypes.Structure):
    _fields_ = [
        ("x", _P), ("residual", _P), ("norm", _P), ("sum", _P), ("y", _P), ("rows", _N), ("width", _N),
        ("scale", c_float), ("half", _I), ("kind", _I), ("failed", _I),
    ]  # fmt: skip


class CAttend(ctypes.Structure):
    _fields_ = [
        ("heads", _P), ("qkv", _P), ("positions", _P), ("slots", _P), ("lens", _P), ("tables", _P), ("owners", _P),
        ("keys", _P), ("values", _P), ("out", _P),
        ("rows", _N), ("table_width", _N), ("block_size", _N), ("next", _N), ("failed", _I),
    ]  # fmt: skip


class CProduct(ctypes.Structure):
    _fields_ = [
        ("weight", _P), ("x", _P), ("residual", _P), ("add", _P), ("sum", _P), ("y", _P),
        ("rows", _N), ("failed", _I),
    ]  # fmt: skip


class CCall(ctypes.Structure):
    _fields_ = [("function", _P), ("arguments", _P)]


class Layout(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("bytes", _N)]


def check_layout(library: ctypes.CDLL) -> None:
    """Raise RuntimeError unless the structures here and in the library have the same sizes and offsets."""
    ours: dict[str, int] = {}
    for struct in (CNorm, CHeads, CWeight, CRows, CAttend, CProduct, CCall):
        name = struct.__name__.removeprefix("C")
        ours[name] = ctypes.sizeof(struct)
        ours |= {f"{name}.{field}": getattr(struct, field).offset for field, *_ in struct._fields_}
    entries = ctypes.cast(library.layout, ctypes.POINTER(Layout))
    theirs = {
        e.name.decode(): e.bytes for e in takewhile(lambda e: e.name, map(entries.__getitem__, count()))
    }
    if wrong := sorted({name for name, _ in ours.items() ^ theirs.items()}):
        found = ", ".join(
            f"{name} {ours.get(name, 'missing')} here, {theirs.get(name, 'missing')} there" for name in wrong
        )
        raise RuntimeError(f"the structures of ops.py do not match those of step.c, in bytes: {found}")


def half(x: torch.Tensor) -> int:
    assert x.dtype in (torch.bfloat16, torch.float32)
    return int(x.dtype == torch.bfloat16)


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def address(struct: ctypes.Structure | None) -> int | None:
    return None if struct is None else ctypes.addressof(struct)


def norm_struct(weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> CNorm:
    return CNorm(weight.data_ptr(), pointer(bias), eps, half(weight))


class CFunction(Protocol):
    """Of step.c: takes the address of its arguments, returns whether memory was short."""

    __name__: str

    def __call__(self, arguments: int) -> int: ...


class CpuKernels:
    """Tensors are contiguous and in one dtype, fp32 or bf16; the weight of a norm may be in the other."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(library)
        self._library = library
        self._thread = threading.local()  # whose `tape` is where calls are noted
        self.span: Callable[[str], AbstractContextManager[Any]] | None = (
            None  # what each kernel runs in, for profilers
        )
        names = ("norm_rows", "gate_rows", "lookup_rows", "turn_rows", "attend_rows", "product")
        for name in names:
            getattr(library, name).argtypes = [_P]
        (
            self._norm_rows,
            self._gate_rows,
            self._lookup_rows,
            self._turn_rows,
            self.attend_rows,
            self.product,
        ) = (getattr(library, name) for name in names)

    def run(self, function: CFunction, arguments: ctypes.Structure, *used: object) -> None:
        """Call it now, and in every replay if calls are recorded; `used` is what the arguments point to."""
        with self.span(f"quire::{function.__name__}") if self.span else _NO_SPAN:
            failed = function(ctypes.addressof(arguments))
        if failed:
            raise MemoryError("no memory for the working space of a step")
        tape = getattr(self._thread, "tape", None)
        if tape is not None:
            tape.append((function, arguments, used))

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """The result of `work`, and what does its calls of kernels again, on the same memory."""
        tape: list[Any] = []
        self._thread.tape = tape
        try:
            result = work()
        finally:
            self._thread.tape = None
        calls = (CCall * len(tape))(
            *(CCall(ctypes.cast(function, c_void_p), address(arguments)) for function, arguments, _ in tape)
        )
        replay = self._library.replay
        replay.argtypes = [_P, _N]

        def again() -> None:
            if replay(calls, len(tape)):  # the tape keeps what is pointed to
                raise MemoryError("no memory for the working space of a step")

        return result, again

    def lookup(self, table: torch.Tensor, ids: torch.Tensor, scale: float | None) -> torch.Tensor:
        rows, width = ids.shape[0], table.shape[1]
        y = table.new_empty(rows, width)
        arguments = CRows(
            table.data_ptr(), ids.data_ptr(), None, None, y.data_ptr(), rows, width, scale or 0.0, half(table)
        )
        self.run(self._lookup_rows, arguments, table, ids, y)
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, None, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, weight, None, eps)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(x, None, weight, bias, eps)[0]

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, weight, bias, eps)

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, width, norm = x.contiguous(), x.shape[-1], norm_struct(weight, bias, eps)
        residual = None if residual is None else residual.contiguous()
        normed = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        arguments = CRows(
            x.data_ptr(), pointer(residual), address(norm), total.data_ptr(), normed.data_ptr(),
            x.numel() // width, width, 0.0, half(x),
        )  # fmt: skip
        self.run(self._norm_rows, arguments, x, residual, norm, weight, bias, total, normed)
        return normed, total

    def gated(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        arguments = CRows(
            gate_up.data_ptr(), None, None, None, out.data_ptr(), rows, width, 0.0, half(gate_up), KINDS[kind]
        )
        self.run(self._gate_rows, arguments, gate_up, out)
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
        heads = CHeads(address(norm), table.data_ptr(), turned - values, values, dim, 0, 0.0, 0.0, half(qkv))
        arguments = CAttend(address(heads), qkv.data_ptr(), positions.data_ptr(), rows=qkv.shape[0])
        self.run(self._turn_rows, arguments, qkv, positions, table, weight, norm, heads)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Where oneDNN keeps a packed weight, in the form that step.c reads: [outputs / block, inputs / v, block, v]."""

    address: int
    vectors: int  # of 16 outputs in a block
    padded: int  # inputs, zeros included


def find_packed(packed: torch.Tensor, weight: torch.Tensor) -> PackedWeight | None:
    """How `packed`, oneDNN's form of `weight` [outputs, inputs], lies in memory; None if that is not clear.

    Nothing promises a form, so some blocks of each possible one are compared with the weight itself.
    """
    if not hasattr(torch.ops.mkldnn, "data_ptr"):  # an older torch
        return None
    found = [form for vectors in (1, 2, 3, 4) if (form := _try(packed, weight, vectors))]
    return found[0] if len(found) == 1 else None


def _try(packed: torch.Tensor, weight: torch.Tensor, vectors: int) -> PackedWeight | None:
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
    return PackedWeight(address, vectors, padded)
