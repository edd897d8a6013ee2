"""Python interface of step.c and attention.c.

`CpuKernels` has the names and arguments of the Triton kernels, and three features of the CPU alone: the product with a
packed weight, attention for rows of one token, and the capture and replay of calls.

Each of their functions takes the address of one structure. The ctypes structure here has the same fields and the same
name with a C in front.
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
FORMS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # of keys and values; 0: numbers of the model's dtype
_MOST_PADDING = 64  # inputs that oneDNN may add to a packed weight
_SAMPLES = 8  # blocks of a packed weight that are compared with the weight
_P, _N, _I = c_void_p, c_int64, c_int32

T = TypeVar("T")
_NO_SPAN = nullcontext()


class CNorm(ctypes.Structure):
    _fields_ = [("weight", _P), ("bias", _P), ("eps", c_float), ("half", _I)]


class CHeads(ctypes.Structure):
    _fields_ = [
        ("norms", _P), ("table", _P),
        ("heads", _N), ("kv_heads", _N), ("dim", _N), ("window", _N),
        ("span", _N), ("sinks", _P),
        ("scale", c_float), ("cap", c_float), ("half", _I), ("form", _I), ("chunked", _I),
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
        ("keys", _P), ("values", _P), ("out", _P), ("key_scales", _P), ("value_scales", _P),
        ("rows", _N), ("table_width", _N), ("block_size", _N), ("scale_stride", _N), ("next", _N), ("failed", _I),
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
    """Raise RuntimeError unless the structures of step.c and attention.c here and in the library match."""
    compare_layout(library.layout, (CNorm, CWeight, CRows, CProduct, CCall))
    compare_layout(library.attention_layout, (CHeads, CAttend))


def compare_layout(layout: Any, structs: tuple[type[ctypes.Structure], ...]) -> None:
    """Raise RuntimeError unless `structs` and the library's list `layout` have the same sizes and offsets."""
    ours: dict[str, int] = {}
    for struct in structs:
        name = struct.__name__.removeprefix("C")
        ours[name] = ctypes.sizeof(struct)
        ours |= {f"{name}.{field}": getattr(struct, field).offset for field, *_ in struct._fields_}
    entries = ctypes.cast(layout, ctypes.POINTER(Layout))
    theirs = {
        e.name.decode(): e.bytes for e in takewhile(lambda e: e.name, map(entries.__getitem__, count()))
    }
    if wrong := sorted({name for name, _ in ours.items() ^ theirs.items()}):
        found = ", ".join(
            f"{name} {ours.get(name, 'missing')} here, {theirs.get(name, 'missing')} there" for name in wrong
        )
        raise RuntimeError(
            f"the C files and their Python interface disagree on structures (sizes and offsets in bytes): {found}; reinstall quire"
        )


def half(x: torch.Tensor) -> int:
    """Return 1 for bf16 and 0 for fp32, the `half` field of the structures."""
    assert x.dtype in (torch.bfloat16, torch.float32)
    return int(x.dtype == torch.bfloat16)


def pointer(x: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's memory, or None."""
    return None if x is None else x.data_ptr()


def address(struct: ctypes.Structure | None) -> int | None:
    """Return the address of a structure, or None."""
    return None if struct is None else ctypes.addressof(struct)


def norm_struct(weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> CNorm:
    """Describe an RMS norm or, with a bias, a LayerNorm. The structure does not keep its tensors alive."""
    return CNorm(weight.data_ptr(), pointer(bias), eps, half(weight))


class CFunction(Protocol):
    """A function of step.c: takes the address of its arguments, returns nonzero if memory ran out."""

    __name__: str

    def __call__(self, arguments: int) -> int: ...


class CpuKernels:
    """The `Kernels` of a CPU.

    The tensors of a call are contiguous and have one dtype, fp32 or bf16; the weight of a norm may have the other.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(library)
        self.library = library
        self._thread = threading.local()  # attribute `tape`: the calls captured so far, or None
        # For profilers: makes the context that a call runs in, from its name.
        self.span: Callable[[str], AbstractContextManager[Any]] | None = None
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
        """Call `function`, and add the call to the capture of this thread if there is one.

        Args:
            function: an attribute of this object, such as `product`.
            arguments: its structure.
            used: the objects that `arguments` points to, which a capture keeps alive.

        Raises:
            MemoryError: if there is no memory for the working space.
        """
        with self.span(f"quire::{function.__name__}") if self.span else _NO_SPAN:
            failed = function(ctypes.addressof(arguments))
        if failed:
            raise MemoryError("no memory for the working space of a step")
        tape = getattr(self._thread, "tape", None)
        if tape is not None:
            tape.append((function, arguments, used))

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Run `work` and capture its kernel calls.

        Returns:
            The result of `work`, and a function that replays the calls on the same memory.
        """
        tape: list[Any] = []
        self._thread.tape = tape
        try:
            result = work()
        finally:
            self._thread.tape = None
        calls = (CCall * len(tape))(
            *(CCall(ctypes.cast(function, c_void_p), address(arguments)) for function, arguments, _ in tape)
        )
        replay = self.library.replay
        replay.argtypes = [_P, _N]

        def again() -> None:
            if replay(calls, len(tape)):  # `tape` keeps the arguments alive
                raise MemoryError("no memory for the working space of a step")

        return result, again

    # The methods below are those of `quire.kernels.Kernels`, which documents them.

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
        span: int = 0,
    ) -> None:
        assert qkv.is_contiguous() and table.dtype == qkv.dtype
        dim = table.shape[1]
        values = qkv.shape[1] // dim - turned  # the heads of v, which stay unchanged; k has as many
        norm = None if weight is None else norm_struct(weight, None, eps)
        heads = CHeads(
            address(norm),
            table.data_ptr(),
            turned - values,
            values,
            dim,
            span=span or dim // 2,
            half=half(qkv),
        )
        arguments = CAttend(address(heads), qkv.data_ptr(), positions.data_ptr(), rows=qkv.shape[0])
        self.run(self._turn_rows, arguments, qkv, positions, table, weight, norm, heads)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The memory of a weight that oneDNN has packed as [outputs / block, inputs / v, block, v], which step.c reads."""

    address: int
    vectors: int  # of 16 outputs per block
    padded: int  # inputs, including padding with zeros


def find_packed(packed: torch.Tensor, weight: torch.Tensor) -> PackedWeight | None:
    """Find the memory layout of a packed weight, or return None if it is not certain.

    oneDNN does not document its layouts, so this compares some blocks with the weight, for each layout that step.c
    can read.

    Args:
        packed: oneDNN's packed form of `weight`.
        weight: [outputs, inputs].
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
