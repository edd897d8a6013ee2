"""Attention over KV entries that are codes with scales: each back end against attention over the rounded numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.base import AttentionBackend
from quire.attention.cpu import CpuAttention
from quire.attention.entries import LARGEST, round_heads
from quire.attention.reference import ReferenceAttention
from quire.config import triton_interpreted
from quire.kernels.cpu import compiled_kernels
from quire.types import KVCodes
from ragged import Case, Layer, Rows, check, check_packed, make_case, oracle

CODES = [
    KVCodes("int8"),
    KVCodes("float8_e4m3fn"),
    KVCodes("float8_e4m3fn", static=True),
]
SIZES = [(part, size) for part in ("q", "k", "v") for size in (1e-8, 1e-3, 1e6)] + [("q", 0.0), ("k", 0.0)]
BACKENDS = ["reference", "cpu", "triton"]


def backend_of(name: str) -> AttentionBackend:
    if name == "reference":
        return ReferenceAttention()
    if name == "triton":
        pytest.importorskip("triton")
        from quire.attention.triton import TritonAttention

        return TritonAttention()
    kernels = compiled_kernels()
    if kernels is None:
        pytest.skip("no C compiler")
    return CpuAttention(kernels)


def draw(
    name: str, codes: KVCodes, seed: int, device: str = "cpu", **options: Any
) -> tuple[Case, AttentionBackend]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads = rng.choice([1, 2, 3])
    dim = rng.choice([16, 24, 64, 80])
    heads = kv_heads * rng.choice([1, 2, 3, 8])
    layer = Layer(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rng.choice([None, None, 5, 24]),
        rng.choice([None, None, 3.0]),
        codes=codes,
    )
    if rng.random() < 0.3:
        layer.sinks = 2 * torch.randn(heads, device=device)
    if codes.static:
        layer.kv_scales = tuple(torch.rand(kv_heads, device=device) / 64 + 1 / 64 for _ in range(2))
    news = [1] if seed % 2 else [1, 1, 2, 9, 40]
    rows: Rows = [
        (rng.randrange(100) if rng.random() < 0.7 else 0, rng.choice(news))
        for _ in range(rng.randrange(1, 5))
    ]
    backend = backend_of(name)
    block_size = rng.choice([1, 5, 16, 64])
    return make_case(rng, backend, layer, rows, block_size, device, **options), backend


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter convert e4m3 numbers as GPUs do. It knows no NaN there, and rounds without carries."""
    if not triton_interpreted():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    inexact = interpreter._convert_float

    def convert(x: np.ndarray, source: Any, to: Any, mode: Any) -> np.ndarray:
        if "fp8e4nv" not in (source.name, to.name):
            return inexact(x, source, to, mode)
        bits = torch.from_numpy(np.ascontiguousarray(x).view(f"i{source.primitive_bitwidth // 8}"))
        found = bits.view(_TORCH_TYPES[source.name]).to(_TORCH_TYPES[to.name])
        return (
            found.view(getattr(torch, f"int{to.primitive_bitwidth}"))
            .numpy()
            .view(f"u{to.primitive_bitwidth // 8}")
        )

    monkeypatch.setattr(interpreter, "_convert_float", convert)


_TORCH_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(name: str, codes: KVCodes, seed: int) -> None:
    check(*draw(name, codes, seed))


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize("seed", range(4))
def test_packed_heads(name: str, codes: KVCodes, seed: int) -> None:
    case, backend = draw(name, codes, 50 + seed)
    check_packed(case, backend, normed=seed > 1)


@pytest.mark.parametrize(("part", "magnitude"), SIZES)
@pytest.mark.parametrize("codes", CODES[:2], ids=str)
def test_numbers_of_any_size(codes: KVCodes, part: str, magnitude: float) -> None:
    """Of one head of a group, or one token: the others keep their size."""
    check_sizes(codes, part, magnitude, "cpu", torch.float32)  # the interpreter multiplies no bf16


@pytest.mark.gpu
@pytest.mark.parametrize(("part", "magnitude"), SIZES)
@pytest.mark.parametrize("codes", CODES[:2], ids=str)
def test_numbers_of_any_size_on_the_gpu(codes: KVCodes, part: str, magnitude: float) -> None:
    check_sizes(codes, part, magnitude, "cuda", torch.bfloat16)


def check_sizes(codes: KVCodes, part: str, magnitude: float, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, backend = Layer(4, 2, 16, 0.25, codes=codes), backend_of("triton")
    case = make_case(random.Random(0), backend, layer, [(20, 9), (30, 1), (0, 3)], 4, device, dtype)
    getattr(case, part)[:, 0] *= magnitude
    getattr(case, part)[3, 1:] *= magnitude
    got, want = backend.forward(layer, case.q, case.k, case.v, case.batch), oracle(case)
    error = (got.double() - want).view(-1, 4, 16).norm(dim=2) / want.view(-1, 4, 16).norm(dim=2)
    assert error.max() < (0.02 if dtype == torch.bfloat16 else 1e-3), f"relative error {error.max():.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_on_the_gpu(codes: KVCodes, seed: int, dtype: torch.dtype) -> None:
    check(*draw("triton", codes, seed, "cuda", dtype=dtype))
    check_packed(*draw("triton", codes, seed, "cuda", dtype=dtype), normed=seed % 2 > 0)


@pytest.mark.parametrize("codes", CODES[:2], ids=str)
def test_shared_blocks_are_read_with_their_scales(codes: KVCodes, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("quire.attention.triton.num_splits", lambda *_: 1)
    torch.manual_seed(1)
    layer, backend = Layer(4, 2, 16, 0.25, codes=codes), backend_of("triton")
    case = make_case(random.Random(1), backend, layer, [(40, 1), (50, 1), (37, 1)], 16)
    batch = case.batch
    first = batch.block_table[batch.slots[0], :2]
    batch.block_table[batch.slots[2], :2] = first
    batch.shared = torch.tensor([32, 0, 32], dtype=torch.int32)
    check(case, backend)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("part", ["k", "v"])
def test_what_is_not_finite_shows_only_to_its_readers(name: str, codes: KVCodes, part: str) -> None:
    torch.manual_seed(0)
    layer, backend = Layer(4, 2, 16, 0.25, codes=codes), backend_of(name)
    if codes.static:
        layer.kv_scales = (torch.full((2,), 0.02), torch.full((2,), 0.02))
    case = make_case(random.Random(0), backend, layer, [(20, 9), (30, 1)], 4)
    getattr(case, part)[4, -1, 3] = float("inf")
    got = backend.forward(layer, case.q, case.k, case.v, case.batch)
    assert got[:4].isfinite().all() and got[9].isfinite().all()
    assert not got[4:9].isfinite().all(1).any()


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_rounding_is_to_the_nearest_code(codes: KVCodes) -> None:
    torch.manual_seed(0)
    dtype = getattr(torch, codes.dtype)
    x = torch.randn(50, 32) * torch.logspace(-12, 12, 50)[:, None]
    x[3] = 0
    scale = torch.full((1,), 1.0) if codes.static else None
    codes_, scales = round_heads(x, dtype, scale)
    error = (codes_.double() * scales.double() - x).abs()
    if codes.static:
        assert (error[x.abs() < 448] <= x.abs()[x.abs() < 448] / 16 + 2**-10).all()
        assert (codes_.float()[x > 448] == 448).all()
    else:
        step = 0.5 if dtype == torch.int8 else 16.0  # half the distance of the largest codes
        assert (error <= scales * step * 1.0001).all()
        assert (codes_.float().abs().amax(1)[x.abs().amax(1) > 0] == LARGEST[dtype]).all()
