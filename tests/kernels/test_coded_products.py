"""Products with quantised weights by the C kernels against the de-quantised weight, alone and fused.

Up to 8 rows the inputs are rounded to 8 bits, which is the reference's tolerance: 1 part in 254 of the largest input of
a row or of 32 inputs. More rows of a model in bf16 are rounded to bf16 with scales per group, if the processor has AMX.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantised import FORMS, WeightMaker
from quire.kernels.cpu import compiled_kernels
from quire.kernels.cpu.codes import CCodedProduct, CCodedWeight
from quire.kernels.cpu.ops import CpuKernels, compare_layout
from quire.quant.coded import CodedMatmul, coded_product, pack_weight
from quire.quant.forms import QuantisedWeight
from quire.quant.rounding import round_int8

EPS = 1e-6
SHAPES = [(96, 128), (45, 384)]  # the second one ends in part of a block
CODED = [form for form in FORMS if not form.startswith("fp8")]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = compiled_kernels()
    if found is None:
        pytest.skip("no C compiler")
    return found


def product_of(
    weight: QuantisedWeight, bias: Tensor | None, kernels: CpuKernels, dtype: torch.dtype = torch.bfloat16
) -> Any:
    env: Any = SimpleNamespace(device=torch.device("cpu"), dtype=dtype, kernels=kernels)
    product = coded_product(env, weight, bias)
    assert product is not None
    return product


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    error = (got.float() - want).norm() / want.norm()
    assert error < tolerance, f"relative error {error:.2e}"


def test_the_structures_match(kernels: CpuKernels) -> None:
    compare_layout(kernels.library.coded_layout, (CCodedWeight, CCodedProduct))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", CODED)
def test_product(form: str, shape: tuple[int, int], dtype: torch.dtype, kernels: CpuKernels) -> None:
    outputs, inputs = shape
    weight = FORMS[form](WeightMaker(outputs, inputs))
    numbers, bias = weight.dequantised(), values(outputs, dtype=dtype)
    multiply = product_of(weight, bias, kernels, dtype)
    for rows in (1, 2, 3, 8, 9, 40):
        x = values(rows, inputs, dtype=dtype)
        close(multiply(x), F.linear(x.float(), numbers, bias.float()), 0.012)
    assert multiply(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("rows", [5, 33])
def test_inputs_are_rounded_as_the_format_says(rows: int, kernels: CpuKernels) -> None:
    """W8A8: the products of 8-bit numbers are exact, so only the order of the sum's factors remains."""
    weight = WeightMaker(70, 200).int8("token")
    x = values(rows, 200, dtype=torch.float32)
    want = round_int8(x) @ weight.dequantised().t()
    close(product_of(weight, None, kernels, torch.float32)(x), want, 1e-6)


def test_scales_and_zeros_are_exact(kernels: CpuKernels) -> None:
    """Integers up to 127 as inputs need no rounding, so codes, zeros and offsets must come out as they are."""
    for form in ("int4 of 32, zeros", "int4 of 128, zeros", "int8 of 32", "mxfp4", "int4 of 64, bf16"):
        weight = FORMS[form](WeightMaker(40, 256))
        x = torch.randint(-126, 127, (3, 256), generator=torch.Generator().manual_seed(1)).float()
        x[:, ::16] = 127
        close(product_of(weight, None, kernels, torch.float32)(x), x @ weight.dequantised().t(), 4e-4)


@pytest.mark.parametrize("outputs", [96, 72])  # 72: the halves are not whole blocks, so the gate is separate
@pytest.mark.parametrize("form", ["int8 rounded", "int4 of 128, zeros", "mxfp4"])
def test_fused_with_its_neighbours(form: str, outputs: int, kernels: CpuKernels) -> None:
    inputs = 256
    weight = FORMS[form](WeightMaker(outputs, inputs))
    numbers, bias, norm = weight.dequantised(), values(outputs), values(inputs).float()
    multiply = product_of(weight, bias, kernels)
    assert isinstance(multiply, CodedMatmul)
    for rows in (1, 8):
        x, residual, beside = values(rows, inputs), values(rows, inputs).flip(0), values(rows, outputs)
        product = multiply(x)
        assert torch.equal(multiply.add(x, beside), (product.float() + beside.float()).bfloat16())
        total = x + residual
        normed = kernels.rms_norm(total, norm, EPS)
        got, summed = multiply.after_norm(norm, EPS, None)(x, residual)
        assert torch.equal(got, multiply(normed)) and torch.equal(summed, total)
        gated, _ = multiply.after_norm(norm, EPS, "silu")(x, residual)
        close(gated, kernels.gated(got, "silu").float(), 2e-3)
        close(got, F.linear(normed.float(), numbers, bias.float()), 0.025)


@pytest.mark.parametrize("form", ["int8 rounded", "int4 of 32, zeros"])
def test_rows_do_not_depend_on_each_other(form: str, kernels: CpuKernels) -> None:
    multiply = product_of(FORMS[form](WeightMaker(50, 256)), None, kernels)
    for rows in (7, 40):
        x = values(rows, 256)
        want = multiply(x)
        x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), 0
        got = multiply(x)
        assert got[0].isnan().any() and not got[1].isfinite().all() and not got[2].any()
        assert torch.equal(got[3:], want[3:])
    assert torch.equal(multiply(values(7, 256)[4:5]), multiply(values(7, 256))[4:5])


@pytest.mark.parametrize("form", CODED)
def test_rows_do_not_depend_on_their_number_in_fp32(form: str, kernels: CpuKernels) -> None:
    multiply = product_of(FORMS[form](WeightMaker(50, 256)), None, kernels, torch.float32)
    x = values(40, 256, dtype=torch.float32)
    want = multiply(x)
    for rows in (1, 2, 5, 8, 9, 33):
        assert torch.equal(multiply(x[:rows]), want[:rows]), rows


def test_forms_that_the_kernels_do_not_take(kernels: CpuKernels) -> None:
    assert pack_weight(WeightMaker(4, 40).groups(4, 8)) is None
    assert pack_weight(WeightMaker(4, 100).int8("none")) is None
    assert pack_weight(WeightMaker(4, 128).fp8(False)) is None
    weight = WeightMaker(4, 128).int8("token")
    assert pack_weight(type(weight)(weight.weight[None], weight.scale[None])) is None
