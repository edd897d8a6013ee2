"""Products with few rows against plain torch in float32, alone and fused with norm, activation and residual.

Without a GPU the kernels run in Triton's interpreter with small odd sizes. On a GPU they run with real sizes, and in
CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.mlp import gated as plain_gated_of
from quire.layers.norm import after_add, make_rms

pytest.importorskip("triton")

from quire.kernels.matmul import gemv as gemv_kernels
from quire.kernels.matmul import skinny as skinny_kernels
from quire.kernels.matmul.gemv import gemv, norm_gemv
from quire.kernels.matmul.skinny import BLOCK_N, is_small, skinny, small_weight_product
from quire.quant.base import PlainMatmul
from quire.quant.few_rows import FewRowsMatmul

CPU, EPS = torch.device("cpu"), 1e-6
DTYPES = [torch.float16, torch.bfloat16]
DOT_DTYPES = [torch.float16]  # the interpreter multiplies no matrices in bfloat16
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")

# outputs, inputs
SMALL = [(5, 16), (33, 80), (2, 1040)]
REAL = [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 1024), (151936, 1024), (128256, 4096), (6144, 4096),
        (4096, 14336), (3072, 8192), (1152, 896), (6912, 1152), (5120, 17408), (256, 7168), (8, 2048),
        (50257, 784)]  # fmt: skip


def cases(small: list, real: list, interpreted_dtypes: list[torch.dtype] = DTYPES) -> list:
    off = [
        pytest.param(CPU, dtype, *shape, marks=interpreted) for dtype in interpreted_dtypes for shape in small
    ]
    cuda = torch.device("cuda")
    on = [pytest.param(cuda, torch.bfloat16, *shape, marks=on_gpu) for shape in real]
    return off + on + [pytest.param(cuda, torch.float16, *real[0], marks=on_gpu)]


def values(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    if device.type == "cuda" and np.prod(shape) > 1 << 20:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)
    drawn = np.random.default_rng([seed, *shape]).normal(0, 1, shape).astype(np.float32)
    return torch.from_numpy(drawn).to(device, dtype)


def weight_of(rows: int, cols: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Make a weight whose products are about as large as their inputs."""
    return values(rows, cols, device=device, dtype=dtype, seed=7) / cols**0.5


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the product in fp32, rounded once."""
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def assert_close(got: Tensor, wanted: Tensor, roundings: int = 1) -> None:
    """Assert equality up to the order of an fp32 sum, which changes a few roundings."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    ulp = torch.finfo(wanted.dtype).eps
    if got.device == CPU and wanted.dtype == torch.bfloat16:
        ulp *= 4  # the interpreter cuts it off, unrounded
    torch.testing.assert_close(got.float(), wanted.float(), rtol=roundings * ulp, atol=roundings * ulp / 4)


# ------------------------------------------------------------------------------------- one and two rows


@pytest.mark.parametrize(("device", "dtype", "outputs", "inputs"), cases(SMALL, REAL))
@pytest.mark.parametrize(("rows", "biased"), [(1, True), (1, False), (2, True)])
def test_gemv(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, rows: int, biased: bool
) -> None:
    if rows > gemv_kernels.most_rows(inputs):
        pytest.skip("not the way for so many rows")
    kind: Any = {"device": device, "dtype": dtype}
    weight, x = weight_of(outputs, inputs, **kind), values(rows, inputs, **kind)
    bias = values(outputs, **kind, seed=3) if biased else None
    wanted = product(x, weight, bias)
    assert_close(gemv(x, weight, bias), wanted)
    residual = values(rows, outputs, **kind, seed=4)
    both = gemv(x, weight, bias, residual)
    # where the two cancel, a rounding of the product counts for more
    assert (both.float() - (wanted + residual).float()).abs().max() <= 4 * torch.finfo(dtype).eps * 4


@pytest.mark.parametrize(
    ("device", "dtype", "outputs", "inputs"),
    cases(SMALL, [(4096, 1024), (14336, 4096), (6912, 1152), (21504, 5376), (8192, 8192)]),
)
@pytest.mark.parametrize(
    ("rows", "act", "added"),
    [
        (1, None, False),
        (1, None, True),
        (2, None, False),
        (1, "silu", False),
        (2, "silu", True),
        (1, "gelu", True),
        (1, "gelu_tanh", True),
        (2, "relu", False),
    ],
)
def test_norm_gemv(
    device: torch.device,
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    rows: int,
    act: str | None,
    added: bool,
) -> None:
    if rows > gemv_kernels.most_rows(inputs):
        pytest.skip("not the way for so many rows")
    kind: Any = {"device": device, "dtype": dtype}
    weight = weight_of(outputs if act is None else 2 * outputs, inputs, **kind)
    bias = values(weight.shape[0], **kind, seed=3) if added else None
    x, residual = (values(rows, inputs, **kind, seed=seed) for seed in (1, 2))
    norm = values(inputs, **kind, seed=5)
    norm = norm.float() + 1 if act == "gelu_tanh" else norm  # Gemma's stays in fp32
    twin = make_rms(norm, inputs, EPS)
    normed, total = after_add(twin)(x, residual) if added else (twin(x), x)
    wanted = product(normed, weight, bias)
    if act is not None:
        wanted = plain_gated_of(act, None)(wanted)
    got, got_total = norm_gemv(x, residual if added else None, norm, EPS, weight, bias, act)
    assert got_total is x if not added else torch.equal(got_total, total) or device == CPU
    assert_close(got_total, total)
    scale = 4 if act is None else 16  # a normed value may be rounded to the other side, and is then squared
    assert_close(got, wanted, scale)


# -------------------------------------------------------------------------------------------- few rows


@pytest.mark.parametrize(
    ("device", "dtype", "outputs", "inputs"), cases([*SMALL, (130, 272), (64, 1536)], REAL, DOT_DTYPES)
)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_skinny(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> None:
    kind: Any = {"device": device, "dtype": dtype}
    weight, x = weight_of(outputs, inputs, **kind), values(rows, inputs, **kind)
    bias = values(outputs, **kind, seed=3) if rows == 3 else None
    arrived = torch.zeros(-(-outputs // BLOCK_N), dtype=torch.int32, device=device)
    for _ in range(2):  # the second finds what the first left
        assert_close(skinny(x, weight, bias, arrived), product(x, weight, bias))
        assert not arrived.any()


@pytest.mark.parametrize(
    ("device", "dtype", "outputs", "inputs"), cases([*SMALL, (130, 272)], REAL, DOT_DTYPES)
)
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_whole(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> None:
    kind: Any = {"device": device, "dtype": dtype}
    weight, x = weight_of(outputs, inputs, **kind), values(rows, inputs, **kind)
    if not is_small(weight):
        pytest.skip("not the way for so large a weight")
    bias = values(outputs, **kind, seed=3) if rows == 3 else None
    assert_close(small_weight_product(x, weight, bias), product(x, weight, bias))


@pytest.mark.parametrize(
    ("device", "dtype", "outputs", "inputs"),
    cases([(33, 80), (64, 1536)], [(4096, 2048), (1024, 3072)], DOT_DTYPES),
)
@pytest.mark.parametrize("small", [False, True])
def test_a_row_does_not_depend_on_the_others(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, small: bool
) -> None:
    kind: Any = {"device": device, "dtype": dtype}
    matmul = FewRowsMatmul(weight_of(outputs, inputs, **kind), None)
    matmul.is_small = small
    x = values(16, inputs, **kind)
    whole = matmul(x)
    for rows in range(matmul.gemv_rows + 1, 16, 1 if device != CPU else 6):
        got = matmul(x[:rows])
        assert_close(got, whole[:rows])
        # The interpreter's product is the CPU library's, which adds in another order for another shape.
        assert device == CPU or torch.equal(got, whole[:rows])
    assert all(torch.equal(matmul(x), whole) for _ in range(20 if device != CPU else 1))


@pytest.mark.parametrize("steps", range(1, 60))
def test_every_program_has_inputs(steps: int) -> None:
    """A program without inputs would end without waiting for the previous kernel."""
    for tiles in (1, 7, 64, 132, 133, 300):
        splits, each = skinny_kernels.split_inputs(tiles, steps * 256 - 16, 264)
        assert (splits - 1) * each < steps * 256 - 16 <= splits * each


@pytest.mark.parametrize(("device", "dtype", "outputs", "inputs"), cases([(32, 64)], [(96, 64)], DOT_DTYPES))
def test_matmul_for_any_number_of_rows(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    kind: Any = {"device": device, "dtype": dtype}
    weight, bias = weight_of(outputs, inputs, **kind), values(outputs, **kind)
    few, plain = FewRowsMatmul(weight, bias), PlainMatmul(weight, bias)
    x = values(40, inputs, **kind)
    for rows in (1, 2, 3, 5, 16, 17, 40):
        assert_close(few(x[:rows]), plain(x[:rows]), 2)
    gate_up, beside = values(3, 2 * inputs, **kind), values(3, outputs, **kind)
    gate, up = gate_up.chunk(2, 1)
    wanted = plain(torch.nn.functional.silu(gate) * up)
    assert_close(few.of_gated(gate_up, "silu", None), wanted, 2)
    assert_close(few.of_gated(gate_up, "silu", beside), wanted + beside, 4)
    strided = torch.stack((x, x), -1)[..., 0]
    assert_close(few(strided[:2]), plain(x[:2]), 2)
    assert FewRowsMatmul.takes(weight)
    assert not FewRowsMatmul.takes(weight.float())
    assert not FewRowsMatmul.takes(weight[:, :24])
    assert not FewRowsMatmul.takes(weight[:, :24].contiguous())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("rows", "small"), [(1, True), (2, True), (8, True), (8, False)])
def test_a_chain_in_a_graph(rows: int, small: bool) -> None:
    """Kernels that start before the previous one has ended compute the same in a graph as one by one."""
    kind: Any = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    up, down = (weight_of(6144, 1024, **kind), weight_of(1024, 3072, **kind))
    first, second = FewRowsMatmul(up, None), FewRowsMatmul(down, None)
    first.is_small = second.is_small = small
    gain = values(1024, **kind, seed=5)
    twin = after_add(make_rms(gain, 1024, EPS))
    fused = first.after_norm(gain, EPS, "silu")
    x, residual = (values(rows, 1024, **kind, seed=seed) for seed in (1, 2))

    def chain() -> Tensor:
        y, total = x, residual
        for _ in range(40):
            if rows <= first.added_rows:
                h, total = fused(y, total)
                y = second.add(h, total) - total
            else:
                normed, total = twin(y, total)
                gate, to = first(normed).chunk(2, -1)
                y = second(F.silu(gate) * to)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for seed in range(10, 15):
        x.copy_(values(rows, 1024, **kind, seed=seed))
        for _ in range(10):
            graph.replay()
        assert torch.equal(captured, chain())
