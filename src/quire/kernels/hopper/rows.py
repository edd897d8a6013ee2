"""y = x W^T for 17 to some hundred rows of x on Hopper: `rows_product`, the launch of rows.cu."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.kernels import nvrtc
from quire.kernels.driver import LoadedKernel, tensor_map
from quire.kernels.jit import compiles_only
from quire.kernels.target import log_choice, target_of

_FOLDER = Path(__file__).parent
_FORMAT_OF = {torch.float8_e4m3fn: "fp8", torch.uint8: "int4", torch.int8: "int8"}
FORMATS = ("half", "fp8", "int4", "int8")
CODE_BYTES = {"int4": 0.5, "int8": 1.0}  # of a number of W, in formats that are converted in registers
KINDS = ("silu", "gelu", "gelu_tanh", "relu")
_SHARED_BYTES = 227 << 10  # of a multiprocessor
_BESIDE = 1024 + 1024 + 512  # bytes beside the rings: alignment, reserve of the system, barriers


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled form of the kernel.

    Attributes:
        rows: of a tile of x, a multiple of 8. Blocks of their own multiply further rows.
        outs: outputs of a block, 128 or 256.
        dtype: of the results: bfloat16 or float16.
        format: of W: half (of x and W), fp8 (of both, with a scale per row and per output), int4 (of W) or int8 (of W,
            with a scale per output).
        kind: activation of the gate if the outputs are gate|up, or None.
        group: columns that share a scale, with int4; 0: all.
        half: as of `reorder_nibbles`, with int4; 64 or 128.
    """

    rows: int
    outs: int
    dtype: torch.dtype
    format: str = "half"
    kind: str | None = None
    group: int = 0
    half: int = 128

    @property
    def stages(self) -> tuple[int, int]:
        """Return the tiles of W and of x that the rings hold."""
        most = _SHARED_BYTES - _BESIDE
        if not self.in_registers:
            pair = 128 * (self.outs + self.rows)
            return most // pair, most // pair
        w_bytes = 128 * self.outs + self._scale_bytes
        x = max(2, min(12, (most - 3 * w_bytes) // (128 * self.rows)))
        return (most - x * 128 * self.rows) // w_bytes, x

    @property
    def in_registers(self) -> bool:
        """Return whether W is converted in registers, from which the matrix units take it."""
        return self.format in CODE_BYTES

    @property
    def _scale_bytes(self) -> int:
        """Return the bytes of scales and zeros of a tile of W."""
        return 128 // self.half * 2 * self.outs * 3 if self.format == "int4" else 0

    @property
    def fits(self) -> bool:
        w, x = self.stages
        ring = 128 * (w * self.outs + x * self.rows)
        return min(w, x) >= 2 and ring >= 4 * self.outs * self.rows

    @property
    def threads(self) -> int:
        """Return the threads of a block: a warpgroup for each 64 outputs, and one that fetches."""
        return 2 * self.outs + 128

    @property
    def shared_bytes(self) -> int:
        w, x = self.stages
        return (
            128 * (w * self.outs + x * self.rows) + (16 + self._scale_bytes) * w + 16 * x + 1024
        )  # 1024: to align

    def source(self) -> str:
        """Return the CUDA C++ of the kernel."""
        consume = "codes.h" if self.in_registers else "numbers.h"
        rows = f"constexpr u32 ROWS = {self.rows};"
        return "\n".join(
            (_text("hopper.h"), rows, self._multiply(), *map(_text, ("rows.h", consume, "rows.cu")))
        )

    def options(self, architecture: str) -> tuple[str, ...]:
        """Return NVRTC's options; `architecture` is like sm_90a."""
        w, x = self.stages
        defines = {
            "OUTS": self.outs, "W_STAGES": w, "X_STAGES": x, "FORMAT": FORMATS.index(self.format), "FP16": int(self.dtype == torch.float16),
            "GATED": int(self.kind is not None), "KIND": KINDS.index(self.kind or "silu"), "HALF": self.half,
            "GROUP": self.group,
        }  # fmt: skip
        return (
            f"--gpu-architecture={architecture}",
            "-std=c++17",
            "-default-device",
            *(f"-D{name}={value}" for name, value in defines.items()),
        )

    def _multiply(self) -> str:
        """Return the C++ function of the matrix instruction, whose operands depend on the number of rows."""
        count = self.rows // 2
        sums = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        half = "f16" if self.dtype == torch.float16 else "bf16"
        shape, types = ("k32", "f32.e4m3.e4m3") if self.format == "fp8" else ("k16", f"f32.{half}.{half}")
        if self.in_registers:
            declared, given, operand = "const u32 (&w)[4]", '"r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])', 4
            first = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        else:
            declared, given, operand, first = "u64 w", '"l"(w)', 1, f"%{count}"
        transposes = {"fp8": "", "half": ", 0, 0"}.get(self.format, ", 0")
        x, keep = count + operand, count + operand + 1
        return (
            f"DEVICE void multiply(float (&d)[{count}], {declared}, u64 x, u32 keep) {{\n"
            f'    asm volatile("{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{keep}, 0;\\n"\n'
            f'        "wgmma.mma_async.sync.aligned.m64n{self.rows}{shape}.{types} {{{sums}}}, {first}, %{x}, '
            f'keep, 1, 1{transposes};\\n}}"\n'
            f'        : {outputs} : {given}, "l"(x), "r"(keep));\n}}\n'
        )


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


class _KernelArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("y", "bias", "residual", "w_scale", "w_zero", "x_scale")),
        *((name, ctypes.c_uint32) for name in ("rows", "outputs", "steps", "groups")),
    )  # fmt: skip


# Loaded kernels by variant and device. They are compiled and loaded by threads, because a kernel may first be asked
# for while other kernels are compiled, or while a graph is captured, in which nothing can be loaded.
_kernels: dict[tuple[Variant, torch.device], Future[LoadedKernel]] = {}
_lock = threading.Lock()
_pool = ThreadPoolExecutor(16, "nvrtc")


def prepare(variant: Variant, device: torch.device) -> Future[LoadedKernel]:
    """Return the kernel of a variant, which is compiled and loaded in the background when it is first asked for."""
    with _lock:
        found = _kernels.get((variant, device))
        if found is None:
            found = _kernels[variant, device] = _pool.submit(_load, variant, device)
        return found


def _load(variant: Variant, device: torch.device) -> LoadedKernel:
    binary = nvrtc.compiled(variant.source(), variant.options(f"sm_{target_of(device).capability}a"))
    return LoadedKernel(binary, "rows_product", variant.shared_bytes, device)


class RowsWeight:
    """A weight as the kernel reads it.

    Args:
        weight: contiguous: [outputs, inputs] of 16 bits, e4m3 or int8, or uint8 [outputs, inputs / 2] of nibbles.
        scale: for e4m3 and int8 fp32 [outputs], for nibbles [groups, outputs] in the dtype of x.
        zero: for nibbles uint8 [groups, outputs], or None: 8.
        bias: [outputs], or None.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None = None,
        zero: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.weight, self.scale, self.zero, self.bias = weight, scale, zero, bias
        self.outputs = weight.shape[0]
        self.map = tensor_map(weight, 64)
        self.steps = -(-weight.shape[1] * weight.element_size() // 128)
        self.format = _FORMAT_OF.get(weight.dtype, "half")
        self.groups = 0 if scale is None or scale.dim() < 2 else scale.shape[0]


def takes(weight: torch.Tensor) -> bool:
    """Return whether the kernel reads a weight [outputs, inputs] on this device."""
    return (
        weight.device.type == "cuda"
        and torch.version.hip is None
        and target_of(weight.device).capability == 90
        and weight.is_contiguous()
        and weight.shape[1] * weight.element_size() % 128 == 0
        and weight.shape[0] % (128 if weight.dtype == torch.uint8 else 32) == 0
        and weight.shape[0] >= 128
        and _compiles()
    )


def _compiles() -> bool:
    if found := nvrtc.available():
        return found
    log_choice(
        "products of 17 to 256 rows by PyTorch, because NVRTC is missing; reinstall the CUDA build of torch"
    )
    return False


def rows_product(
    x: torch.Tensor,
    weight: RowsWeight,
    variant: Variant,
    split: int,
    x_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, or act(gate) * up of it, plus the residual: [rows, outputs].

    Args:
        x: [rows, inputs], contiguous; e4m3 with an FP8 variant.
        weight: [outputs of the product, inputs].
        variant: of the kernel.
        split: blocks of a cluster, which divide the inputs; at most 8.
        x_scale: fp32 [rows], with e4m3.
        residual: [rows, outputs], or None.
    """
    gated = variant.kind is not None
    outputs = weight.outputs // 2 if gated else weight.outputs
    y = torch.empty(x.shape[0], outputs, dtype=variant.dtype, device=x.device)
    kernel = prepare(variant, x.device)
    if compiles_only():
        return y
    tiles = -(-weight.outputs // variant.outs) * -(-x.shape[0] // variant.rows)
    pointers = (y, weight.bias, residual, weight.scale, weight.zero, x_scale)
    arguments = _KernelArguments(
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
        x.shape[0],
        outputs,
        weight.steps,
        weight.groups,
    )
    x_map = tensor_map(x, variant.rows)
    kernel.result().launch(
        tiles * split, split, variant.threads, [weight.map, x_map, arguments], dependent=True
    )
    return y
