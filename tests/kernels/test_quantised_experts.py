"""The kernels of quantised experts against de-quantised experts in fp64.

Without a GPU they run in Triton's interpreter, with fp16 inputs, as in test_packed_products.py.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantised import FORMS, LateWeights, WeightMaker, memory_of

pytest.importorskip("triton")

from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.experts.group import group
from quire.kernels.experts.many import GroupedTile, weighted_sum
from quire.kernels.experts.many_packed import many_packed_down, many_packed_gate_up
from quire.kernels.experts.route import route, rule_arguments
from quire.kernels.matmul.round_fp8 import round_fp8
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.layers.expert_weights import ExpertWeights
from quire.layers.mlp import gated
from quire.layers.moe import GroupedMLPs, MoE, SortedExperts, masked_product
from quire.layers.quantised_experts import QuantisedExperts, fused_quantised, matrices_of
from quire.layers.routing import FusingRouter
from quire.quant.forms import Fp8Weight, QuantisedWeight

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
interpreted = pytest.mark.skipif(ON_GPU, reason="the compiled tests cover this")
TOLERANCE = 1e-2 if ON_GPU else 2e-2  # the interpreter truncates to bf16
IN_FP8 = 0.06  # of inputs that are rounded to 4 significant bits, twice


def stack(form: str, experts: int, outputs: int, inputs: int, size: float) -> QuantisedWeight:
    """Return matrices with values of about `size`."""
    distinct = [FORMS[form](WeightMaker(outputs, inputs, seed)) for seed in range(min(experts, 5))]
    made = [distinct[expert % len(distinct)] for expert in range(experts)]
    values: dict[str, Any] = {
        field.name: [getattr(one, field.name) for one in made] for field in fields(made[0])
    }
    for name, all_of in values.items():
        is_tensor = isinstance(all_of[0], Tensor)
        values[name] = torch.stack(all_of).to(DEVICE) if is_tensor else all_of[0]
    weight = type(made[0])(**values)
    ratio = size / float(weight.dequantised().square().mean().sqrt())
    if form == "mxfp4":
        return replace(weight, scale=weight.scale + round(torch.tensor(ratio).log2().item()))
    if form == "nvfp4":
        return replace(weight, global_scale=weight.global_scale * ratio)
    offset = getattr(weight, "offset", None)
    return replace(
        weight, scale=weight.scale * ratio, **({} if offset is None else {"offset": offset * ratio})
    )


class QuantisedCase:
    """A layer of experts and the choice of its tokens."""

    def __init__(
        self,
        form: str,
        tokens: int,
        *,
        kind: str = "silu",
        biased: bool = False,
        sizes: tuple[int, int, int, int] = (6, 2, 256, 128),
    ) -> None:
        """Make `sizes`: experts, chosen ones, hidden, width."""
        self.kind, self.tokens = kind, tokens
        self.experts, top_k, hidden, width = sizes
        make = torch.Generator().manual_seed(tokens)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make).to(DEVICE)

        self.x = random(tokens, hidden).to(DTYPE)
        matrices = (
            stack(form, self.experts, 2 * width, hidden, hidden**-0.5),
            stack(form, self.experts, hidden, width, width**-0.5),
        )
        biases = (random(self.experts, 2 * width).to(DTYPE), random(self.experts, hidden).to(DTYPE))
        self.weights = ExpertWeights(*matrices, *(biases if biased else ()))
        logits = random(tokens, self.experts)
        logits[:, 1] = -100.0  # an expert without tokens
        self.choice = route(logits, None, rule_arguments(self.experts, top_k, renormalise=True))
        self.numbers = [weight.dequantised().double() for weight in matrices]

    def layer(self, weights: LateWeights | None = None) -> QuantisedExperts:
        env: Any = SimpleNamespace(weights=weights or SimpleNamespace(when_loaded=lambda action: action()))
        layer = fused_quantised(env, self.weights, self.kind)
        assert layer is not None
        return layer

    def wanted(self) -> Tensor:
        biases = (self.weights.gate_up_bias, self.weights.down_bias)
        exact = ExpertWeights(*self.numbers, *(None if one is None else one.double() for one in biases))
        plain = SortedExperts(GroupedMLPs(exact, gated(self.kind, None), masked_product))
        return plain(self.x.double(), self.choice)

    def check(self, got: Tensor, tolerance: float = TOLERANCE) -> None:
        wanted = self.wanted()
        assert got.dtype == DTYPE and got.shape == wanted.shape
        error = float((got.double() - wanted).norm() / wanted.norm())
        assert error <= tolerance, f"relative error {error:.5f}"

    def many(self, layer: QuantisedExperts, first: GroupedTile, second: GroupedTile) -> Tensor:
        x, scales = self.x, None
        if layer.rounds:
            x, scales, _ = round_fp8(x, layer.gate_up.group > 0)
        grouped = group(self.choice, self.experts, first.rows)
        weights = self.weights
        h, scales = many_packed_gate_up(
            x, scales, layer.gate_up, weights.gate_up_bias, grouped, self.kind, first, DTYPE
        )
        rows = many_packed_down(h, scales, layer.down, weights.down_bias, grouped, second, DTYPE)
        return weighted_sum(rows, grouped.place, self.choice.weights)


SMALL = {"sizes": (5, 2, 128, 64)}
FORMATS = [form for form in FORMS if "permuted" not in form and form != "int8 rounded"]
TILES = GroupedTile(16, 32, 64, 4, 2, False), GroupedTile(16, 64, 128, 4, 2, True)


# The interpreter takes seconds for a form, so it leaves out those that differ in the size of a group only.
INTERPRETED = [
    form for form in FORMATS if form not in ("int4 of 32, zeros", "int4 of 64, bf16", "int4 of 128")
]


@interpreted
@pytest.mark.parametrize("form", INTERPRETED)
def test_every_form(form: str) -> None:
    sizes = (4, 2, 128, 128)  # a block of each format
    case = QuantisedCase(form, 3, sizes=sizes)
    layer = case.layer()
    case.check(layer(case.x, case.choice))
    assert not layer.arrived.any()
    case = QuantisedCase(form, 19, sizes=sizes)
    case.check(case.many(case.layer(), *TILES))


@interpreted
@pytest.mark.parametrize("form", ["fp8 blocks", "int8 of 128, zeros", "int4 of 64, bf16", "mxfp4"])
def test_weights_that_arrive_late_stay_where_kernels_read_them(form: str) -> None:
    """A graph that is captured before the checkpoint is read computes with what arrives later."""
    case, late = QuantisedCase(form, 2, sizes=(4, 2, 128, 128)), LateWeights()
    layer = case.layer(late)
    before = memory_of(layer)
    layer(case.x, case.choice)
    late.finish()
    assert memory_of(layer) == before and len(before) >= 4
    case.check(layer(case.x, case.choice))


@interpreted
@pytest.mark.parametrize("form", ["fp8 rows", "fp8 blocks", "int8 rows", "mxfp4", "nvfp4"])
def test_one_token(form: str) -> None:
    """All of these but NVFP4 have kernels of their own."""
    case = QuantisedCase(form, 1, sizes=(4, 2, 256, 128), biased=True)
    layer = case.layer()
    own = matrices_of(layer.down, None)
    assert (own is not None) == (form != "nvfp4")
    case.check(layer(case.x, case.choice))


@interpreted
def test_one_token_in_mxfp4_with_a_tail() -> None:
    """Rows of 576 columns, which are 288 bytes, leave a part of the last load empty."""
    case = QuantisedCase("mxfp4", 1, sizes=(4, 3, 576, 64), kind="clamped_swiglu", biased=True)
    case.check(case.layer()(case.x, case.choice))


@interpreted
@pytest.mark.parametrize("form", ["mxfp4", "fp8 rows"])
@pytest.mark.parametrize("tokens", [2, 18])
def test_biases_gates_and_sizes_that_fill_no_tile(form: str, tokens: int) -> None:
    case = QuantisedCase(form, tokens, kind="clamped_swiglu", biased=True, sizes=(5, 3, 192, 96))
    case.check(case.layer()(case.x, case.choice))


@interpreted
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows"])
def test_inputs_rounded_to_fp8(form: str) -> None:
    """Each product is compared with that of the codes that it reads: the interpreter rounds some to wrong ones."""
    case = QuantisedCase(form, 21)
    layer, tile = case.layer(), GroupedTile(16, 128, 128, 8, 2, False)
    grouped = group(case.choice, case.experts, tile.rows)
    owner = torch.searchsorted(grouped.ends, torch.arange(len(grouped.source)), right=True)
    first, second = (numbers.float()[owner] for numbers in case.numbers)
    x, scales, _ = round_fp8(case.x, form == "fp8 blocks")
    h, h_scales = many_packed_gate_up(x, scales, layer.gate_up, None, grouped, "silu", tile, DTYPE)
    assert h_scales is not None
    rounded = (x.float() * scales.repeat_interleave(x.shape[1] // scales.shape[1], 1))[grouped.source.long()]
    wanted = gated("silu", None)(torch.einsum("rok,rk->ro", first, rounded))
    repeated = h_scales.repeat_interleave(128, 1)
    limit = wanted.abs() * (2.0**-4 + 0.01) + repeated * 2.0**-8  # half a step of e4m3, and of fp16
    assert ((h.float() * repeated - wanted).abs() > limit).float().mean() < 0.03
    rows = many_packed_down(h, h_scales, layer.down, None, grouped, tile, DTYPE)
    wanted = torch.einsum("rok,rk->ro", second, h.float() * repeated)
    assert (rows.float() - wanted).norm() < 1e-3 * wanted.norm()


class ConstantRouter(FusingRouter):
    """A router that returns the same choice for all rows, and keeps what it was given."""

    fused_rows = 16

    def __init__(self, choice: ExpertChoice) -> None:
        self.choice, self.rows = choice, torch.empty(0)

    def __call__(self, x: Tensor) -> ExpertChoice:
        self.rows = x
        return self.choice

    def after_norm(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[ExpertChoice, Tensor, Tensor]:
        raise AssertionError("for few rows only")


@interpreted
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows"])
@pytest.mark.parametrize("beside", [False, True])
def test_inputs_rounded_with_the_norm_in_front(form: str, beside: bool) -> None:
    """One kernel norms for the router and rounds for the experts, and changes no bit."""
    case = QuantisedCase(form, 21)
    layer, router = case.layer(), ConstantRouter(case.choice)
    layer.rounds = True
    parallel: Any = SimpleNamespace(all_reduce=lambda y: y)
    moe, gain, eps = MoE(router, layer, parallel), torch.rand(256, device=DEVICE).to(DTYPE) + 0.5, 1e-6
    fused, most = moe.after_norm(gain, eps) or (None, 0)
    assert fused is not None and most >= 1 << 20
    residual = case.x.flip(0).contiguous() if beside else None
    got, total = fused(case.x, residual)
    normed = rms_norm(case.x, gain, eps) if residual is None else add_rms_norm(case.x, residual, gain, eps)[0]
    assert torch.equal(router.rows, normed)
    assert torch.equal(total, case.x if residual is None else case.x + residual)
    assert torch.equal(got, layer(normed, case.choice)) and got.isfinite().all()
    layer.rounds = False
    assert moe.after_norm(gain, eps)[1] == router.fused_rows  # type: ignore[index]


@pytest.mark.parametrize("tokens", [4, 20])
def test_a_token_that_is_not_finite_changes_no_other(tokens: int) -> None:
    case = QuantisedCase("mxfp4", tokens, **SMALL)
    layer = case.layer()
    clean = layer(case.x, case.choice)
    case.x[2, 5] = float("nan")
    sick = layer(case.x, case.choice)
    others = torch.arange(tokens) != 2
    assert torch.equal(sick[others], clean[others]) and sick[2].isnan().all()


def test_what_the_kernels_do_not_take() -> None:
    env: Any = SimpleNamespace(weights=SimpleNamespace(when_loaded=lambda action: action()))
    permuted = QuantisedCase("int4, permuted", 1).weights
    assert fused_quantised(env, permuted, "silu") is None
    plain = QuantisedCase("mxfp4", 1).weights
    assert fused_quantised(env, replace(plain, down=plain.down.dequantised()), "silu") is None


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 64, 300])
def test_on_the_gpu(form: str, tokens: int) -> None:
    case = QuantisedCase(form, tokens, sizes=(32, 4, 512, 256))
    layer = case.layer()
    case.check(layer(case.x, case.choice))
    again = layer(case.x, case.choice)
    assert torch.equal(again, layer(case.x, case.choice))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 33, 200, 2000])
@pytest.mark.parametrize(
    ("form", "sizes", "kind", "biased"),
    [
        ("mxfp4", (32, 4, 2880, 2880), "clamped_swiglu", True),
        ("fp8 blocks", (128, 8, 2048, 768), "silu", False),
        ("int4 of 128, zeros", (128, 8, 2048, 768), "silu", False),
    ],
)
def test_shapes_of_models(
    form: str, sizes: tuple[int, int, int, int], kind: str, biased: bool, tokens: int
) -> None:
    case = QuantisedCase(form, tokens, sizes=sizes, kind=kind, biased=biased)
    weights = case.weights
    if isinstance(weights.gate_up, Fp8Weight) and isinstance(weights.down, Fp8Weight):
        case.weights = replace(
            weights,
            gate_up=replace(weights.gate_up, rounding="block"),
            down=replace(weights.down, rounding="block"),
        )
    layer = case.layer()
    case.check(layer(case.x, case.choice), IN_FP8 if layer.rounds else TOLERANCE)
