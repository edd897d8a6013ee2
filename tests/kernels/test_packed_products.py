"""Products with quantised weights by Triton kernels against the de-quantised weight in fp32.

Without a GPU the kernels run in Triton's interpreter, with fp16 inputs: it multiplies no matrices in bfloat16, and
rounds some numbers to the wrong e4m3 number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantised import FORMS, LateWeights, WeightMaker, memory_of

pytest.importorskip("triton")

from quire.kernels.matmul.nibble_rows import nibble_rows, takes_rows, word_order
from quire.kernels.matmul.packed import half_for, reorder_nibbles
from quire.kernels.matmul.rescale import rescale
from quire.kernels.matmul.round_fp8 import round_fp8
from quire.kernels.matmul.tiles import RowsTile
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.residual import FusedMLP, ResidualAdd, SplitProjection
from quire.quant.base import NEVER, PlainMatmul, RoundedRows
from quire.quant.forms import QuantisedWeight, unpack4
from quire.quant.loading import ConcatenatedMatmul
from quire.quant.packed_codes import PackedCodesMatmul, PermutedInputs, make_packed_codes, packed_tensors

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = 6e-3 if ON_GPU else 1e-3
SHAPES = [(6144, 4096), (1000, 2048)] if ON_GPU else [(132, 384), (40, 256)]
EPS = 1e-6


class _Weights:
    """Weights that are in place already."""

    def when_loaded(self, action: Any) -> None:
        action()


def on_device(weight: QuantisedWeight) -> QuantisedWeight:
    """Return a copy, which a product may rearrange."""
    values = {name: getattr(weight, name) for name in type(weight).__dataclass_fields__}
    return type(weight)(
        **{k: v.to(DEVICE, copy=True) if isinstance(v, Tensor) else v for k, v in values.items()}
    )


def product_of(weight: QuantisedWeight, bias: Tensor | None) -> Any:
    env: Any = SimpleNamespace(weights=_Weights(), device=DEVICE, dtype=DTYPE)
    product = make_packed_codes(env, on_device(weight), bias)
    assert product is not None
    return product


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def tolerance_of(form: str, rows: int) -> float:
    """Return the relative error that is allowed: one or two rows round x to 8 bits for integers of 4 bits."""
    return 0.012 if rows <= 2 and form.startswith("int4") else TOLERANCE


def close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    error = (got.float() - want).norm() / want.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_product(form: str, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight = FORMS[form](WeightMaker(outputs, inputs))
    numbers, bias = weight.dequantised().to(DEVICE), values(outputs)
    multiply = product_of(weight, bias)
    for rows in (1, 3, 17) if not ON_GPU else (1, 3, 16, 17, 64, 100, 256, 300):
        x = values(rows, inputs)
        want = F.linear(x.float(), numbers, bias.float())
        close(multiply(x), want, tolerance_of(form, rows))
    assert multiply(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_arrive_late_stay_where_kernels_read_them(form: str) -> None:
    """A graph that is captured before the checkpoint is read computes with what arrives later."""
    outputs, inputs = SHAPES[-1]
    weight, late, x = FORMS[form](WeightMaker(outputs, inputs)), LateWeights(), values(1, inputs)
    env: Any = SimpleNamespace(weights=late, device=DEVICE, dtype=DTYPE)
    product: Any = make_packed_codes(env, on_device(weight), None)
    multiply = product.product if isinstance(product, PermutedInputs) else product
    before = memory_of(multiply)
    product(x)
    late.finish()
    assert memory_of(multiply) == before and len(before) >= 3
    close(product(x), F.linear(x.float(), weight.dequantised().to(DEVICE)), tolerance_of(form, 1))


@pytest.mark.parametrize("form", ["fp8 rows", "fp8 blocks", "int4 of 64, bf16", "int4 of 32, zeros", "mxfp4"])
def test_fused_with_its_neighbours(form: str) -> None:
    outputs, inputs = SHAPES[0] if ON_GPU else (256 if "blocks" in form else 24, 256)
    weight = FORMS[form](WeightMaker(outputs, inputs))
    numbers, bias, norm = weight.dequantised().to(DEVICE), values(outputs), values(inputs).float()
    multiply = product_of(weight, bias)
    assert isinstance(multiply, PackedCodesMatmul)
    if takes_rows(multiply.weight):
        multiply.narrow_rows = 16
    for rows in (1, 5, 33):
        tolerance = 2 * tolerance_of(form, rows)
        x, residual, beside = values(rows, inputs), values(rows, inputs).flip(0), values(rows, outputs)
        close(multiply.add(x, beside), F.linear(x.float(), numbers, bias.float()) + beside.float(), tolerance)
        total = (x + residual).float()
        normed = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * norm
        want = F.linear(normed, numbers, bias.float())
        got, summed = multiply.after_norm(norm, EPS, None)(x, residual)
        close(got, want, tolerance)
        assert torch.equal(summed.float(), total)
        gate, up = want.chunk(2, 1)
        close(multiply.after_norm(norm, EPS, "silu")(x, residual)[0], F.silu(gate) * up, 2 * tolerance)
        alone, same = multiply.after_norm(norm, EPS, None)(x + residual, None)
        close(alone, got.float(), 1e-3)
        assert torch.equal(same, x + residual)


@pytest.mark.parametrize("form", ["fp8 rows", "int4 of 128, zeros", "mxfp4"])
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    outputs, inputs = SHAPES[-1]
    multiply = product_of(FORMS[form](WeightMaker(outputs, inputs)), None)
    x = values(7, inputs)
    assert torch.equal(multiply(x)[3:4], multiply(x[[3, 0, 1]])[:1])
    assert torch.equal(multiply(x[:2])[1:], multiply(x[1:2]))
    x[0, 5] = float("nan")
    spoilt = multiply(x)
    assert spoilt[0].isnan().all() and multiply(x[:1]).isnan().all()
    assert torch.equal(spoilt[1:], multiply(x[1:]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "tile",
    [
        RowsTile(64, 16, 4, 3, 16, 4),  # several tiles of rows, split columns
        RowsTile(128, 64, 8, 3, 32, 0, scale_w=False),  # scales behind the product
        RowsTile(64, 32, 4, 2, 64, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "form", ["int4 of 128, zeros", "int4 of 64, bf16", "int4 of 32, zeros", "int4 of a row"]
)
def test_tiles_for_many_rows(form: str, tile: RowsTile, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight = FORMS[form](WeightMaker(outputs, inputs))
    multiply = product_of(weight, None)
    x = values(41, inputs)
    got = nibble_rows(x, multiply.weight, None, multiply.arrived, tile=tile)
    close(got, x.float() @ weight.dequantised().to(DEVICE).t())
    assert torch.equal(nibble_rows(x, multiply.weight, None, multiply.arrived, tile=tile), got)
    assert not multiply.arrived.any()
    x[0, 5] = float("nan")
    spoilt = nibble_rows(x, multiply.weight, None, multiply.arrived, tile=tile)
    assert spoilt[0].isnan().all() and torch.equal(spoilt[1:], got[1:])


def test_the_order_of_words_is_that_of_the_weight() -> None:
    x = values(3, 256)
    halves = word_order(x, 64).unflatten(1, (4, 2, 32))
    assert torch.equal(halves.transpose(2, 3).flatten(1), x)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("before", ["", "norm", "gate"])
def test_rounding_to_fp8(block: bool, before: str) -> None:
    rows, width = 5, 384
    x, options = values(rows, 2 * width if before == "gate" else width), {}
    x[1], x[2, 3] = 0, 3000
    want = x.float()
    if before == "norm":
        residual, norm = values(rows, width).flip(0), values(width)
        options = {"norm": norm, "residual": residual, "eps": EPS}
        total = (x + residual).float()
        want = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * norm.float()
    elif before == "gate":
        options = {"kind": "silu"}
        want = F.silu(want[:, :width]).to(DTYPE).float() * want[:, width:]
    codes, scales, total = round_fp8(x, block, **options)
    repeated = scales.repeat_interleave(128 if block else width, 1)
    # Half a step of e4m3. The interpreter drops the carry where rounding reaches the next power of two.
    limit = want.abs() * (2.0**-4 + 0.005) + repeated * 2.0**-9
    wrong = (codes.float() * repeated - want).abs() > limit
    assert wrong.float().mean() <= (0 if ON_GPU else 0.03)
    if before == "norm":
        assert torch.equal(total, x + residual)
    if block:
        same, turned, _ = round_fp8(x, True, **options, by_column=True)
        assert torch.equal(same.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(turned, scales)
        assert turned.stride() == (1, rows)
    x[3, 1] = float("inf")
    assert round_fp8(x, block, **options)[1][3, 0].isnan()


@pytest.mark.parametrize("rounding", ["token", "tensor", "block"])
def test_products_of_rounded_inputs(rounding: str) -> None:
    outputs, inputs = SHAPES[0]
    weight = WeightMaker(outputs, inputs).fp8(rounding == "block", rounding)
    numbers = weight.dequantised().to(DEVICE)
    multiply = product_of(weight, None)
    multiply.rounds, multiply.most_in_registers, multiply.most_in_fp8 = True, 2, 20
    x, beside = values(19, inputs), values(19, outputs)
    codes, scales, _ = round_fp8(x, rounding == "block", multiply.input_scale)
    want = F.linear(codes.float() * scales.repeat_interleave(inputs // scales.shape[1], 1), numbers)
    close(multiply(x), want)
    close(multiply.add(x, beside), want + beside.float())
    rounded, output = RoundedRows(codes, scales, DTYPE), object.__new__(ResidualAdd)
    output.product = output.matmul = multiply
    output.linear = multiply  # type: ignore[assignment]
    for most in (18, 19):  # rows to which the kernel of the product adds the residual
        multiply.added_rows = most
        got, left = output.of_rounded(rounded, beside)
        wanted, wanted_left = output(x, beside)
        assert torch.equal(got, wanted) and left is wanted_left and (left is None) == (most == 19)
    multiply.gemv_rows = 0
    close(multiply(x[:2]), x[:2].float() @ numbers.t())
    norm = values(inputs)
    codes, scales, total = round_fp8(
        x, rounding == "block", multiply.input_scale, norm=norm, residual=x, eps=EPS
    )
    want = F.linear(codes.float() * scales.repeat_interleave(inputs // scales.shape[1], 1), numbers)
    got, summed = multiply.after_norm(norm, EPS, "silu")(x, x)
    gate, up = want.chunk(2, 1)
    close(got, F.silu(gate) * up, 2 * TOLERANCE)
    assert torch.equal(summed, total)


def test_scales_of_blocks_come_in_the_order_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no kernel has to put them into it, unless rows are added to fill a multiple of four."""
    multiply = product_of(WeightMaker(128, 512).fp8(True, "block"), None)
    multiply.rounds, multiply.in_library, multiply.most_in_registers, multiply.most_in_fp8 = True, True, 2, 4
    seen = []

    def product(self: Any, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen.append(scales)
        return torch.zeros(len(codes), 128, dtype=dtype, device=codes.device)

    monkeypatch.setattr(type(multiply), "_multiply_blocks", product)
    x = values(8, 512)
    multiply(x)
    multiply.after_norm(values(512), EPS, None)(x, x)
    multiply.of_gated(values(8, 1024), "silu", None)
    assert [scales.shape for scales in seen] == [(8, 4)] * 3
    assert all(scales.t().is_contiguous() for scales in seen)
    assert [multiply.scale_order(rows) for rows in (2, 3, 4, 5, 8)] == [
        None,
        "rows",
        "rows",
        "columns",
        "columns",
    ]
    multiply.rounds = False
    assert multiply.scale_order(8) is None


@pytest.mark.parametrize("beside", [False, True])
def test_a_norm_in_front_of_products_in_different_formats(beside: bool) -> None:
    """As in FP8 checkpoints of Qwen3-Next: one kernel norms for the plain product and rounds for the other."""
    hidden, sizes = 256, [96, 40, 8]
    rounding = product_of(WeightMaker(128, hidden).fp8(True, "block"), None)
    rounding.rounds, rounding.most_in_registers, rounding.most_in_fp8 = True, 2, 100
    linear = object.__new__(Linear)
    linear.needs_reduce = False
    linear.multiply = ConcatenatedMatmul([rounding, PlainMatmul(values(16, hidden), None)])
    norm = object.__new__(RMSNorm)
    norm.weight, norm.eps, norm.fuses = values(hidden), EPS, True
    norm.alone = lambda x: rms_norm(x, norm.weight, EPS)
    norm.add = lambda x, residual: add_rms_norm(x, residual, norm.weight, EPS)
    project, calls = SplitProjection(norm, linear, sizes), []
    for rows in (2, 19):  # the first ones are not rounded
        x = values(rows, hidden)
        residual = x.flip(0).contiguous() if beside else None
        got, total = project(x, residual)
        normed, wanted_total = norm(x, residual)
        wanted = linear(normed).split(sizes, 1)
        assert [part.shape[1] for part in got] == sizes and total is not None
        assert all(map(torch.equal, got, wanted)) and torch.equal(total, wanted_total)
        calls.append(linear.multiply.rounding(rows))
    assert calls == [None, rounding]


@pytest.mark.parametrize("rounding", ["token", "block"])
def test_the_gate_is_computed_with_the_inputs_of_the_product_behind(rounding: str) -> None:
    """With many rows the activation costs no pass over memory of its own, and changes no bit."""
    hidden, inner, rows = (1024, 2048, 300) if ON_GPU else (128, 384, 19)

    def linear(outputs: int, inputs: int) -> Linear:
        layer = object.__new__(Linear)
        layer.needs_reduce = False
        layer.multiply = product_of(WeightMaker(outputs, inputs).fp8(rounding == "block", rounding), None)
        layer.multiply.rounds, layer.multiply.most_in_registers = True, 2
        return layer

    mlp, norm = object.__new__(GatedMLP), object.__new__(RMSNorm)
    mlp.gate_up, mlp.down, mlp.kind = linear(2 * inner, hidden), linear(hidden, inner), "silu"
    norm.weight, norm.eps = values(hidden), EPS
    x, residual = values(rows, hidden), values(rows, hidden).flip(0)
    fused, found = FusedMLP(norm, mlp, adds=True), []
    for apart_rows in (NEVER, 1):
        fused.apart_rows = apart_rows
        y, total = fused(x, residual)
        found.append(y if total is None else y + total)
    assert torch.equal(*found)
    if ON_GPU:
        many = FusedMLP(norm, mlp, adds=True)
        assert 64 < many.apart_rows <= rows if rounding == "block" else many.apart_rows > rows
        normed = x + residual
        normed = (normed.float() * torch.rsqrt(normed.float().square().mean(1, keepdim=True) + EPS)).to(DTYPE)
        numbers = [layer.multiply.form.dequantised().to(DEVICE).float() for layer in (mlp.gate_up, mlp.down)]
        gate, up = ((normed * norm.weight).float() @ numbers[0].t()).chunk(2, 1)
        close(found[0], (F.silu(gate) * up) @ numbers[1].t() + (x + residual).float(), 0.06)


@pytest.mark.parametrize("kind", [None, "silu"])
def test_scales_behind_a_product(kind: str | None) -> None:
    sums, rows, columns, bias = values(5, 80), values(5).float(), values(80).float(), values(80)
    beside = values(5, 80 if kind is None else 40)
    want = sums.float() * rows[:, None] * columns + bias.float()
    if kind:
        gate, up = want.to(DTYPE).float().chunk(2, 1)
        want = F.silu(gate).to(DTYPE).float() * up
    close(rescale(sums, rows, columns, bias, beside, kind), want + beside.float())
    close(rescale(sums, rows, columns, bias, None, kind), want)


def test_many_rows_take_the_unpacked_weight() -> None:
    weight = FORMS["int4 of 32, offsets"](WeightMaker(*SHAPES[1]))
    multiply = product_of(weight, None)
    multiply.most_in_registers = 2
    x = values(20, SHAPES[1][1])
    close(
        multiply(x), x.float() @ weight.dequantised().to(DEVICE).t(), 8e-3
    )  # the weight is rounded to 16 bits


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
def test_a_part_of_a_block_of_outputs_is_unpacked_for_many_rows() -> None:
    """As of the latents of DeepSeek: the inputs are not rounded then, whose error would be 0.025."""
    weight, x = WeightMaker(576, 1024).fp8(True, "block"), values(1000, 1024)
    close(product_of(weight, None)(x), x.float() @ weight.dequantised().to(DEVICE).t())


def test_nibbles_keep_their_columns() -> None:
    weight = WeightMaker(3, 256).groups(4, 64)
    half = half_for(64, 256)
    assert half == 64
    assert half_for(128, 256) == 128
    codes = unpack4(weight.packed)
    moved = reorder_nibbles(weight.packed, half)
    assert torch.equal(moved[:, :64] & 15, codes[:, :64]) and torch.equal(moved[:, 64:] >> 4, codes[:, 192:])
    assert half_for(64, 192) == 32 and half_for(0, 96) == 16 and half_for(16, 80) == 0


def test_weights_that_the_kernels_do_not_take() -> None:
    make = WeightMaker(8, 80)
    assert packed_tensors(make.groups(4, 16)) is None  # an odd number of groups
    assert packed_tensors(make.groups(8, 80)) is None
    assert packed_tensors(WeightMaker(8, 24).int8("token")) is None
    stack = make.int8("none")
    assert packed_tensors(type(stack)(stack.weight[None], stack.scale[None])) is None


def test_permuted_inputs() -> None:
    weight = FORMS["int4, permuted"](WeightMaker(*SHAPES[1]))
    assert isinstance(product_of(weight, None), PermutedInputs)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
@pytest.mark.parametrize("inputs", [1024, 2944])
@pytest.mark.parametrize("rows", [33, 65, 130, 1001, 2047, 4096])
def test_blocks_are_multiplied_with_any_number_of_rows(rows: int, inputs: int) -> None:
    """The library takes multiples of four rows and of four blocks of inputs only."""
    weight = WeightMaker(256, inputs).fp8(True, "block")
    numbers = weight.dequantised().to(DEVICE)
    multiply = product_of(weight, None)
    x = values(rows, inputs)
    codes, scales, _ = round_fp8(x, True, None)
    want = F.linear(codes.float() * scales.repeat_interleave(128, 1), numbers)
    close(multiply(x), want)
