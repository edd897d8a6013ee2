"""Products of 17 to 256 rows on Hopper against plain torch in fp32, alone and in chains in CUDA graphs.

The choice of variants and the sizes of rings are tested without a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.hopper.choice import LEAST_ROWS, most_rows_for, variant_for, variants_for
from quire.kernels.hopper.rows import FORMATS, KINDS, RowsWeight, Variant, rows_product, takes
from quire.kernels.matmul.packed import half_for, reorder_nibbles
from quire.kernels.norm import add_rms_norm

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
CUDA = torch.device("cuda")
SHARED_BYTES = 232_448  # most shared memory of a block
ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
# outputs and inputs of the products of Qwen3-0.6B, Llama-3.2-3B, Llama-3.1-8B, and of odd sizes
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (5120, 3072), (6144, 4096), (28672, 4096),
          (4096, 14336), (1056, 14336), (128, 64), (160, 192)]  # fmt: skip


@pytest.mark.parametrize(("format", "shape"), itertools.product(FORMATS, SHAPES))
def test_every_chosen_variant_fits(format: str, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    for rows in range(1, most_rows_for(format, outputs, inputs, True) + 1):
        for group, half in ((128, 128), (64, 64)) if format == "int4" else ((0, 128),):
            variant, split = variant_for(
                format, rows, outputs, inputs, torch.bfloat16, "silu", 132, group, half
            )
            stages_w, stages_x = variant.stages
            assert variant.fits and variant.shared_bytes <= SHARED_BYTES
            assert variant.rows <= 256 and variant.rows % 8 == 0 and variant.rows < rows + 64
            assert min(stages_w, stages_x) >= 2
            steps = -(-inputs * {"half": 2, "fp8": 1, "int4": 0.5, "int8": 1}[format] // 128)
            assert 1 <= split <= 8 and split <= steps  # every block of a cluster has a step
            blocks = -(-outputs // variant.outs) * -(-rows // variant.rows)
            assert split == 1 or blocks * split <= 132


def test_few_variants_are_compiled() -> None:
    shapes = [(6144, 4096), (4096, 4096), (4096, 14336)]
    variants = {
        variant_for("half", rows, *shape, torch.bfloat16, None, 132)[0]
        for rows in range(LEAST_ROWS, 129)
        for shape in shapes
    }
    assert len(variants) == 4


@pytest.mark.parametrize(("format", "shape"), itertools.product(("half", "int4", "int8"), SHAPES))
def test_every_variant_is_known_before_it_is_needed(format: str, shape: tuple[int, int]) -> None:
    """A variant that a step is the first to need is compiled while all wait: for seconds."""
    sizes = (*shape, torch.bfloat16, None, 132)
    known = variants_for(format, *sizes)
    most = most_rows_for(format, *shape, False)
    assert {variant_for(format, rows, *sizes)[0] for rows in range(LEAST_ROWS, most + 1)} <= known
    assert len(known) < 10


def test_the_source_names_what_differs() -> None:
    one = Variant(64, 128, torch.bfloat16)
    others = [
        Variant(96, 128, torch.bfloat16),
        Variant(64, 256, torch.bfloat16),
        Variant(64, 128, torch.float16),
        Variant(64, 128, torch.bfloat16, "fp8"),
        Variant(64, 128, torch.bfloat16, "int4", None, 128, 64),
        Variant(64, 128, torch.bfloat16, "int8"),
        Variant(64, 128, torch.bfloat16, "half", "relu"),
    ]
    texts = {(v.source(), v.options("sm_90a")) for v in (one, *others)}
    assert len(texts) == 1 + len(others)


# ---------------------------------------------------------------------------------------------- on a GPU


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device=CUDA).to(dtype)


def make_nibbles(
    outputs: int, inputs: int, group: int, zeros: bool, dtype: torch.dtype
) -> tuple[RowsWeight, Tensor, int]:
    """Return a weight of 4-bit codes, its numbers, and its `half`."""
    half = half_for(group, inputs)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=CUDA)
    scale = (torch.rand(inputs // group, outputs, device=CUDA) / inputs**0.5).to(dtype)
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=CUDA) if zeros else None
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(dtype)
    offset = 8 if zero is None else zero.t().to(dtype).repeat_interleave(group, 1)
    numbers = (numbers - offset) * scale.t().repeat_interleave(group, 1)
    return RowsWeight(reorder_nibbles(codes, half), scale, zero), numbers, half


def make_bytes(outputs: int, inputs: int) -> tuple[RowsWeight, Tensor]:
    """Return a weight of signed integers and its numbers."""
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=CUDA)
    scale = torch.rand(outputs, device=CUDA) / 64 / inputs**0.5
    return RowsWeight(codes, scale), codes.float() * scale[:, None]


def reference(
    product: Tensor, bias: Tensor | None, kind: str | None, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return what separate operations compute of a product in fp32."""
    product = product if bias is None else product + bias.float()
    product = product.to(dtype).float()
    if kind:
        gate, up = product.chunk(2, -1)
        product = ACTIVATIONS[kind](gate).to(dtype).float() * up
        product = product.to(dtype).float()
    return product if residual is None else product + residual.float()


def assert_near(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert torch.isfinite(got).all()
    assert (got.float() - wanted).norm() <= tolerance * wanted.norm()


CASES = [
    pytest.param(*case, marks=on_hopper) for case in itertools.product(FORMATS, SHAPES[:-1], (None, "silu"))
]


@pytest.mark.parametrize(("format", "shape", "kind"), CASES)
def test_rows_are_multiplied(format: str, shape: tuple[int, int], kind: str | None) -> None:
    outputs, inputs = shape
    if format == "int4" and outputs % 128:
        pytest.skip("rows of codes are a multiple of 128")
    dtype, most = torch.bfloat16, most_rows_for(format, outputs, inputs, kind is not None)
    sms = torch.cuda.get_device_properties(CUDA).multi_processor_count
    bias = values(outputs, dtype=dtype, seed=1)
    group, half, scales, weight_scale = 0, 128, None, None
    if format == "int4":
        group = 64 if inputs % 256 else 128
        weight, numbers, half = make_nibbles(outputs, inputs, group, kind is None, dtype)
        weight = RowsWeight(weight.weight, weight.scale, weight.zero, bias)
    elif format == "int8":
        weight, numbers = make_bytes(outputs, inputs)
        weight = RowsWeight(weight.weight, weight.scale, None, bias)
    elif format == "fp8":
        numbers = values(outputs, inputs).to(torch.float8_e4m3fn)
        weight_scale = torch.rand(outputs, device=CUDA) / inputs**0.5
        weight = RowsWeight(numbers, weight_scale, bias=bias)
    else:
        numbers = (values(outputs, inputs) / inputs**0.5).to(dtype)
        weight = RowsWeight(numbers, bias=bias)
    if not takes(weight.weight):
        pytest.skip("not a weight of the kernel")
    for rows in sorted({1, LEAST_ROWS, 33, 64, 65, 100, 129, 200, most - 1, most} & set(range(1, most + 1))):
        x = values(rows, inputs, seed=2).to(numbers.dtype if format == "fp8" else dtype)
        product = x.float() @ numbers.float().t()
        if weight_scale is not None:
            scales = torch.rand(rows, 1, device=CUDA) + 0.5
            product = product * scales * weight_scale
        residual = None if kind else values(rows, outputs, dtype=dtype, seed=3)
        variant, split = variant_for(format, rows, outputs, inputs, dtype, kind, sms, group, half)
        got = rows_product(x, weight, variant, split, scales, residual)
        assert_near(got, reference(product, bias, kind, residual, dtype), 1e-2 if format == "fp8" else 4e-3)
        for _ in range(3):  # equal in every run
            assert torch.equal(rows_product(x, weight, variant, split, scales, residual), got)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on_hopper) for kind in KINDS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations(kind: str, dtype: torch.dtype) -> None:
    numbers = (values(2 * 1040, 1024) / 32).to(dtype)
    x = values(40, 1024, dtype=dtype)
    got = rows_product(x, RowsWeight(numbers), Variant(64, 128, dtype, "half", kind), 2)
    assert_near(got, reference(x.float() @ numbers.float().t(), None, kind, None, dtype), 4e-3)


TILES = [
    pytest.param(*case, marks=on_hopper)
    for case in itertools.product(FORMATS, (128, 256), (1, 3), (None, "silu"))
]


@pytest.mark.parametrize(("format", "outs", "split", "kind"), TILES)
def test_further_rows_are_further_tiles(format: str, outs: int, split: int, kind: str | None) -> None:
    """Rows do not depend on the tiles that they are divided into: of 64, the last one partly filled."""
    outputs, inputs, dtype = 1280, 1024, torch.bfloat16
    if format == "int4":
        weight, _, half = make_nibbles(outputs, inputs, 128, True, dtype)
    elif format == "int8":
        (weight, _), half = make_bytes(outputs, inputs), 128
    elif format == "fp8":
        codes = values(outputs, inputs).to(torch.float8_e4m3fn)
        weight, half = RowsWeight(codes, torch.rand(outputs, device=CUDA)), 128
    else:
        weight, half = RowsWeight(values(outputs, inputs, dtype=dtype)), 128
    x = values(150, inputs, seed=1).to(torch.float8_e4m3fn if format == "fp8" else dtype)
    scales = torch.rand(150, 1, device=CUDA) if format == "fp8" else None
    variant = Variant(64, outs, dtype, format, kind, 128 if format == "int4" else 0, half)
    got = rows_product(x, weight, variant, split, scales)
    alone = [
        rows_product(rows.contiguous(), weight, variant, split, None if scales is None else part)
        for rows, part in zip(x.split(64), (scales if scales is not None else x).split(64), strict=True)
    ]
    assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("place", [pytest.param(place, marks=on_hopper) for place in (0, 17, 39)])
def test_a_row_that_is_not_finite_spoils_no_other(place: int) -> None:
    numbers = (values(1024, 2048) / 45).to(torch.bfloat16)
    x = values(40, 2048, dtype=torch.bfloat16)
    weight, variant = RowsWeight(numbers), Variant(64, 128, torch.bfloat16)
    wanted = rows_product(x, weight, variant, 3)
    x[place, 5] = float("nan")
    got = rows_product(x, weight, variant, 3)
    others = torch.arange(40, device=CUDA) != place
    assert torch.equal(got[others], wanted[others]) and got[place].isnan().all()


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=on_hopper) for rows in (17, 64, 128)])
def test_a_chain_in_a_graph(rows: int) -> None:
    """Products start before the previous kernel has ended, and still compute the same as one by one."""
    up = RowsWeight((values(2 * 3072, 1024) / 32).to(torch.bfloat16))
    down = RowsWeight((values(1024, 3072) / 55).to(torch.bfloat16))
    gain = torch.ones(1024, device=CUDA, dtype=torch.bfloat16)
    x, residual = (values(rows, 1024, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    gated, plain = Variant(128, 128, torch.bfloat16, "half", "silu"), Variant(128, 128, torch.bfloat16)

    def chain(wait: bool) -> Tensor:
        y, total = x, residual
        for _ in range(40):
            normed, total = add_rms_norm(y, total, gain, 1e-6)
            hidden = rows_product(normed, up, gated, 1)
            if wait:
                torch.cuda.synchronize()
            y = rows_product(hidden, down, plain, 5)
        return y

    wanted = chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, wanted)
