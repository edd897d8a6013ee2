"""The fused kernels against their references, the plain torch code of the layers.

Without a GPU they run in Triton's interpreter with small odd sizes. On a GPU they run with real sizes, and in CUDA
graphs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.layers.mlp import gated as plain_gated_of
from quire.layers.norm import HeadNorm, after_add, make_layer_norm, make_rms
from quire.layers.rope import Rope, RotaryHeads
from quire.layers.rope_params import RopeParams

pytest.importorskip("triton")

from quire.kernels import activation, norm, open_gate, rope
from quire.kernels.matmul.round_fp8 import round_fp8
from quire.models.gated_attention import GatedSelfAttention

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")


def cases(small: list, real: list) -> list:
    """Return cases of (device, dtype, *shape): small shapes in the interpreter, real ones on a GPU."""
    off = [pytest.param(CPU, dtype, *shape, marks=interpreted) for dtype in DTYPES for shape in small]
    on = [
        pytest.param(torch.device("cuda"), dtype, *shape, marks=on_gpu) for dtype in DTYPES for shape in real
    ]
    return off + on


def values(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng([seed, *shape]).normal(0, 1, shape).astype(np.float32)
    return torch.from_numpy(drawn).to(device, dtype)


def assert_close(got: Tensor, wanted: Tensor, equal: bool = False) -> None:
    """Assert equality up to a few roundings (and the tails of gelu, where torch suffers cancellation)."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    ulp = torch.finfo(wanted.dtype).eps
    if got.device == CPU and wanted.dtype == torch.bfloat16:  # the interpreter cuts it off, unrounded
        torch.testing.assert_close(got.float(), wanted.float(), rtol=4 * ulp, atol=4 * ulp)
    elif equal:
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got.float(), wanted.float(), rtol=2 * ulp, atol=16 * ulp)
        assert (
            wanted.dtype == torch.float32 or (got - wanted).abs().gt(1e-5).sum() <= 1 + wanted.numel() // 50
        )


# ------------------------------------------------------------------------------------------- norms

ROWS = cases([(3, 33), (1, 1), (2, 130)], [(1, 1024), (37, 4096), (2, 5376), (5, 16384), (300, 896)])


@pytest.mark.parametrize(("device", "dtype", "rows", "width"), ROWS)
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm(device: torch.device, dtype: torch.dtype, rows: int, width: int, offset: bool) -> None:
    x, residual = (values(rows, width, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = values(width, device=device, dtype=dtype, seed=3)
    weight = weight.float() + 1 if offset else weight  # Gemma's stays in fp32
    twin = make_rms(weight, width, 1e-6)
    assert_close(norm.rms_norm(x, weight, 1e-6), twin(x))
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    wanted, wanted_total = after_add(twin)(x, residual)
    assert_close(total, wanted_total, equal=True)
    assert_close(normed, wanted)


@pytest.mark.parametrize(("device", "dtype", "rows", "width"), ROWS)
def test_layer_norm(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (values(rows, width, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, bias = (values(width, device=device, dtype=dtype, seed=seed) for seed in (3, 4))
    twin = make_layer_norm(weight, bias, 1e-5)
    assert_close(norm.layer_norm(x, weight, bias, 1e-5), twin(x))
    normed, total = norm.add_layer_norm(x, residual, weight, bias, 1e-5)
    wanted, wanted_total = after_add(twin)(x, residual)
    assert_close(total, wanted_total, equal=True)
    assert_close(normed, wanted)


# ------------------------------------------------------------------------------------ rotary heads


def head_norm(weight: Tensor, eps: float) -> HeadNorm:
    made = object.__new__(HeadNorm)  # without a checkpoint
    made.weight, made.eps, made.rms = weight, eps, make_rms(weight, weight.shape[-1], eps)
    return made


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "heads", "kv_heads", "dim"),
    cases(
        [(5, 3, 1, 12), (1, 2, 2, 16), (3, 9, 3, 6)],
        [(1, 16, 8, 128), (100, 32, 8, 128), (33, 14, 2, 64), (7, 8, 4, 256), (9, 32, 32, 80), (9, 7, 1, 96)],
    ),
)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_heads(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    normed: bool,
) -> None:
    turned, eps = heads + kv_heads, 1e-6
    weight = values(turned, dim, device=device, dtype=dtype, seed=1) if normed else None
    layer_norm = None if weight is None else head_norm(weight, eps)
    width = (turned + kv_heads) * dim
    packed = values(tokens, width + dim, device=device, dtype=dtype)
    qkv, behind = packed[:, :width], packed[:, width:].clone()
    positions = torch.arange(tokens, device=device).flip(0) * 7
    rope_table = Rope(RopeParams(theta=10000.0), dim, 1000, device, dtype)
    twin = RotaryHeads(heads, kv_heads, dim, layer_norm)
    wanted = [part.clone() for part in twin(qkv, rope_table.lookup(positions))]
    rope.norm_rotate_(qkv, positions, rope_table.table, weight, eps, turned)
    got = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    for part, wanted_part in zip(got, wanted):
        assert_close(part, wanted_part)
    assert torch.equal(got[2], wanted[2]) and torch.equal(packed[:, width:], behind)


# -------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize(
    ("device", "dtype", "rows", "width"),
    cases([(3, 33), (1, 1), (2, 1025)], [(1, 3072), (256, 14336), (2048, 1535), (1, 4864)]),
)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated(device: torch.device, dtype: torch.dtype, rows: int, width: int, kind: str) -> None:
    gate_up = 3 * values(rows, 2 * width, device=device, dtype=dtype)
    assert_close(activation.gated(gate_up, kind), plain_gated_of(kind, None)(gate_up))


@pytest.mark.parametrize(
    ("device", "dtype", "rows", "width"), cases([(3, 33), (2, 1025)], [(1, 4096), (256, 2048)])
)
def test_open_gate(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, packed = (values(rows, 2 * width, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    x, gate = x[:, :width].contiguous(), packed[:, width:]
    assert_close(open_gate.open_gate(x, gate), x * gate.sigmoid())


@pytest.mark.parametrize("by_column", [False, True])
def test_an_opened_gate_that_is_rounded_changes_no_bit(by_column: bool) -> None:
    """The codes and scales are those of the kernel that rounds the result."""
    device, dtype = (
        (torch.device("cuda"), torch.bfloat16)
        if torch.cuda.is_available()
        else (torch.device("cpu"), torch.float16)
    )
    x, packed = (values(5, 1280, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    packed = torch.cat((x, packed), 1)
    x[1], x[2, 700] = 0, float("inf")
    codes, scales = open_gate.open_gate_rounded(x, packed[:, 1280:], by_column)
    opened = open_gate.open_gate(x, packed[:, 1280:])
    wanted, wanted_scales, _ = round_fp8(opened, True, by_column=by_column)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)
    assert scales.stride() == wanted_scales.stride() and scales[2, 5].isnan()


@interpreted
@pytest.mark.parametrize("is_last", [False, True])
def test_gated_attention_rounds_what_its_output_projection_rounds(is_last: bool) -> None:
    """Unless it is the last layer, whose result is narrowed before the projection."""
    packed = values(20, 640, device=torch.device("cpu"), dtype=torch.float16)
    attended, residual = (
        values(20, 256, device=torch.device("cpu"), dtype=torch.float16, seed=1),
        torch.zeros(20, 1),
    )

    class Output:
        def __call__(self, x: Any, residual: Any) -> Any:
            return x, residual

        def scale_order(self, rows: int) -> str | None:
            return "columns" if rows == 20 else None

        def of_rounded(self, x: Any, residual: Any) -> Any:
            return x, residual

    layer: Any = object.__new__(GatedSelfAttention)
    layer.gate_width, layer.is_last, layer.o = 256, is_last, Output()
    layer.qkv, layer.attend = lambda x, r: (packed, r), lambda qkv, rotation, batch: attended
    layer.open_gate, layer.rounded_gate = open_gate.open_gate, open_gate.open_gate_rounded
    found, _ = layer(None, residual, None, SimpleNamespace(narrow=lambda x, r: (x[-1:], r)))
    opened = open_gate.open_gate(attended, packed[:, 384:])
    if is_last:
        assert torch.equal(found, opened[-1:])
    else:
        codes, scales, _ = round_fp8(opened, True, by_column=True)
        assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(found.scales, scales) and found.dtype == opened.dtype


# ---------------------------------------------------------------------------------------- captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_everything_can_be_captured() -> None:
    """A graph with every kernel computes the same on new inputs as the kernels outside of it."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    x, residual = (values(8, 1024, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = values(1024, device=device, dtype=dtype, seed=3)
    table = Rope(RopeParams(theta=10000.0), 128, 64, device, dtype).table
    positions = torch.arange(8, device=device)

    def everything() -> tuple[Tensor, ...]:
        normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
        alone = norm.rms_norm(normed, weight, 1e-6)
        layered, again = norm.add_layer_norm(alone, total, weight, weight, 1e-5)
        lonely = norm.layer_norm(layered, weight, weight, 1e-5)
        qkv = torch.cat((lonely, again), 1)
        rope.norm_rotate_(qkv, positions, table, None, 0.0, 12)
        out = activation.gated(qkv, "silu")
        return qkv, out

    everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    for seed in (10, 20):
        x.copy_(values(8, 1024, device=device, dtype=dtype, seed=seed))
        graph.replay()
        for got, wanted in zip(captured, everything()):
            assert torch.equal(got, wanted)
