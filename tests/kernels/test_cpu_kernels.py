"""The CPU kernels against their references in plain torch, with odd sizes and with those of models."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quire.attention.cpu import CpuAttention
from quire.kernels.cpu import compiled_kernels
from quire.kernels.cpu.ops import CpuKernels
from quire.layers.mlp import gated
from quire.layers.norm import HeadNorm, after_add, make_layer_norm, make_rms
from quire.layers.rope import Rope, RotaryHeads
from quire.layers.rope_params import RopeParams
from quire.quant.base import PlainMatmul
from quire.quant.packed import FewRowsPackedMatmul, pack
from ragged import Layer, Rows, check_packed, make_case

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 16, 33, 130, 384, 1024]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = compiled_kernels()
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Assert equality up to rounding (of products up to 4 times the result, as in the tails of gelu)."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    ulp = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(got.float(), wanted.float(), rtol=4 * ulp, atol=64 * ulp, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm(kernels: CpuKernels, dtype: torch.dtype, rows: int, width: int, offset: bool) -> None:
    x, residual = (values(rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = values(width, dtype=dtype, seed=3)
    weight = weight.float() + 1 if offset else weight  # Gemma's stays in fp32
    twin = make_rms(weight, width, 1e-6)
    assert_close(kernels.rms_norm(x, weight, 1e-6), twin(x))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    wanted, wanted_total = after_add(twin)(x, residual)
    assert torch.equal(total, wanted_total)
    assert_close(normed, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(kernels: CpuKernels, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (values(rows, width, dtype=dtype, seed=seed) + seed for seed in (1, 2))
    weight, bias = (values(width, dtype=dtype, seed=seed) for seed in (3, 4))
    twin = make_layer_norm(weight, bias, 1e-5)
    assert_close(kernels.layer_norm(x, weight, bias, 1e-5), twin(x))
    normed, total = kernels.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert_close(normed, after_add(twin)(x, residual)[0])
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 16), (9, 100)])
def test_gated(kernels: CpuKernels, dtype: torch.dtype, kind: str, rows: int, width: int) -> None:
    x = values(rows, 2 * width, dtype=dtype) * 4
    x[0, :4] = torch.tensor([0.0, -200.0, 200.0, 1e-20])
    assert_close(kernels.gated(x, kind), gated(kind, None)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_what_is_no_number_stays_so(kernels: CpuKernels, dtype: torch.dtype, kind: str) -> None:
    """Otherwise a broken weight would produce a plausible answer."""
    x = torch.ones(1, 40, dtype=dtype)
    x[0, 3] = float("nan")
    assert kernels.gated(x, kind).isnan().nonzero().tolist() == [[0, 3]]
    assert kernels.rms_norm(x, torch.ones(40), 1e-6).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_is_no_number_shows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    backend, layer = CpuAttention(kernels), Layer(4, 2, 16, 0.25)
    case = make_case(random.Random(1), backend, layer, [(9, 1), (30, 1)], 4, dtype=dtype)
    case.batch.kv[0][0][case.batch.block_table[case.batch.slots[1], 2], 1, 1, 5] = float(
        "nan"
    )  # of the second row's second kv head
    table = Rope(RopeParams(theta=10000.0), 16, 64, torch.device("cpu"), dtype).table
    out = backend.forward_packed(layer, case.qkv.flatten(1), None, table, case.batch).view(2, 4, 16)
    assert out[1, 2:].isnan().all() and not out[0].isnan().any() and not out[1, :2].isnan().any()


def head_norm(heads: int, dim: int, dtype: torch.dtype) -> HeadNorm:
    made = object.__new__(HeadNorm)  # without a checkpoint
    weight = values(heads, dim, dtype=dtype, seed=5)
    made.weight, made.eps, made.rms = weight, 1e-6, make_rms(weight, dim, 1e-6)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [(5, 3, 1, 12), (1, 2, 2, 16), (9, 9, 3, 6), (33, 16, 8, 128)]
)
def test_rotary_heads(
    kernels: CpuKernels, dtype: torch.dtype, normed: bool, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    norm = head_norm(heads + kv_heads, dim, dtype) if normed else None
    positions = torch.arange(tokens).flip(0) * 7
    rope = Rope(RopeParams(theta=10000.0), dim, 1000, torch.device("cpu"), dtype)
    qkv = values(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    twin = RotaryHeads(heads, kv_heads, dim, norm)
    wanted = [part.clone() for part in twin(qkv.clone(), rope.lookup(positions))]
    for part, wanted_part in zip(
        RotaryHeads(heads, kv_heads, dim, norm, kernels)(qkv, rope.lookup(positions)), wanted
    ):
        assert_close(part, wanted_part)


# -------------------------------------------------------------------------------------- attention

LAYERS = [
    Layer(8, 2, 64, 0.125),
    Layer(3, 3, 16, 0.3),
    Layer(4, 1, 24, 0.2, window=37),
    Layer(6, 2, 12, 0.3, soft_cap=2.0),
    Layer(6, 2, 12, 0.3, window=37, chunked=True),
    Layer(16, 8, 128, 128**-0.5, window=16, soft_cap=30.0),
    Layer(4, 2, 24, 0.2, sinks=torch.tensor([1.0, -2.0, 3.0, 0.0]), span=1),
    Layer(4, 2, 40, 0.2, window=9, sinks=torch.tensor([9.0, -90.0, 0.5, 2.0]), span=15),
]
ROWS: list[Rows] = [
    [(0, 1)],
    [(1, 1), (200, 1), (33, 1), (0, 1)],
    [(1023, 1)],
    [(70, 1), (0, 19), (5, 1), (40, 3)],  # not all have one token
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("block_size", [1, 16])
def test_attention(
    kernels: CpuKernels, dtype: torch.dtype, layer: Layer, rows: Rows, normed: bool, block_size: int
) -> None:
    torch.manual_seed(len(rows))
    backend = CpuAttention(kernels)
    check_packed(make_case(random.Random(1), backend, layer, rows, block_size, dtype=dtype), backend, normed)


def test_attention_without_rotation(kernels: CpuKernels) -> None:
    """A model without rotary embedding, such as GPT-2, uses the reference although the kernel made the plan."""
    backend = CpuAttention(kernels)
    case = make_case(random.Random(1), backend, Layer(4, 4, 16, 0.25), [(9, 1), (30, 1)], 4)
    assert case.batch.attn is None
    backend.forward(case.layer, case.q, case.k, case.v, case.batch)
    assert case.batch.attn is not None


# --------------------------------------------------------------------------------------- products

SHAPES = [(384, 384), (37, 31), (2304, 384), (100, 72), (1024, 1), (1, 64), (4096, 1024)]


def packed(kernels: CpuKernels, weight: Tensor, bias: Tensor | None = None) -> FewRowsPackedMatmul:
    made = pack(weight, bias, kernels)
    if not isinstance(made, FewRowsPackedMatmul):
        pytest.skip("this torch packs weights in a form that is not known")
    return made


def close_product(got: Tensor, wanted: Tensor, inputs: int) -> None:
    error = (got.float() - wanted.float()).abs().max() / (wanted.float().abs().max() + 1e-9)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert error < (8e-3 if got.dtype == torch.bfloat16 else 1e-5), f"{error:.1e} with {inputs} inputs"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_product(kernels: CpuKernels, dtype: torch.dtype, outputs: int, inputs: int, has_bias: bool) -> None:
    weight = values(outputs, inputs, dtype=dtype, seed=1)
    bias = values(outputs, dtype=dtype, seed=2) if has_bias else None
    matmul, plain = packed(kernels, weight, bias), PlainMatmul(weight, bias)
    whole = matmul(values(matmul.fused_rows, inputs, dtype=dtype))
    for rows in range(1, matmul.fused_rows + 2):
        x = values(matmul.fused_rows + 1, inputs, dtype=dtype)[:rows]
        residual = values(rows, outputs, dtype=dtype, seed=3)
        got = matmul(x)
        close_product(got, plain(x), inputs)
        if rows <= matmul.fused_rows:
            close_product(matmul.add(x, residual), residual + plain(x), inputs)
            one = matmul(values(matmul.fused_rows + 1, inputs, dtype=dtype)[:1])
            assert torch.equal(got[:1], one), "a row's result depends on the rows beside it"
    assert whole.shape == (matmul.fused_rows, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), [(768, 96), (90, 33), (2048, 384), (6, 5)])
def test_product_after_a_norm(
    kernels: CpuKernels, dtype: torch.dtype, kind: str | None, outputs: int, inputs: int
) -> None:
    weight = values(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    gain = values(inputs, dtype=dtype, seed=2).float() + 1
    step = packed(kernels, weight).after_norm(gain, 1e-6, kind)
    norm, finish = make_rms(gain, inputs, 1e-6), gated(kind, None) if kind else (lambda y: y)
    for rows in (1, 3, 4):
        x, residual = (values(rows, inputs, dtype=dtype, seed=seed) for seed in (3, 4))
        got, total = step(x, residual)
        assert torch.equal(total, x + residual)
        close_product(got, finish(PlainMatmul(weight, None)(norm(total))), inputs)
        got, total = step(x, None)
        assert total is x
        close_product(got, finish(PlainMatmul(weight, None)(norm(x))), inputs)


@pytest.mark.parametrize("weight", [torch.zeros(384, 384), torch.ones(384, 384)])
def test_a_form_that_is_not_clear_is_not_used(kernels: CpuKernels, weight: Tensor) -> None:
    """A constant weight matches every layout, so none is certain."""
    made = pack(weight, None, kernels)
    assert made is not None
    close_product(made(torch.ones(2, 384)), PlainMatmul(weight, None)(torch.ones(2, 384)), 384)
