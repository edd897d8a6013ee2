"""The C kernels of routers and experts against plain PyTorch."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from packing import need_packed
from quantised import FORMS, WeightMaker
from quire.kernels.cpu import compiled_kernels
from quire.kernels.cpu.experts import ExpertFunctions, RuleOfRouter
from quire.kernels.cpu.ops import CpuKernels
from quire.kernels.experts.choice import ExpertChoice
from quire.layers.activation import ACTIVATIONS
from quire.layers.c_experts import CExpertMLPs, FewRowsExperts, c_expert_mlps
from quire.layers.env import Env
from quire.layers.expert_weights import ExpertWeights, StackedWeight
from quire.layers.mlp import gated
from quire.layers.moe import LoopedMLPs, SortedExperts, make_experts
from quire.layers.routing import choose_experts, exact_sigmoid
from quire.layers.routing_params import Routing
from quire.parallel.experts import ALL_EXPERTS, ExpertShard
from quire.parallel.ranks import Parallel
from quire.quant.base import PlainMatmul
from quire.quant.products import any_product

EXPERTS, TOP_K = 6, 3
RULES = {
    "softmax": Routing(num_experts=12, top_k=3),
    "renormalised": Routing(num_experts=12, top_k=4, renormalise=True, scale=2.5),
    "sigmoid": Routing(num_experts=12, top_k=3, scores="sigmoid", correction=True, renormalise=True),
    "groups": Routing(num_experts=12, top_k=4, groups=4, top_groups=2, scale=16),
    "two largest": Routing(
        num_experts=24, top_k=4, scores="sigmoid", groups=4, top_groups=2, group_score="two_largest", correction=True
    ),
    "one expert": Routing(num_experts=1, top_k=1),
    "sparsemixer": Routing(num_experts=12, top_k=2, scores="sparsemixer", jitter=0.3),
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = compiled_kernels()
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rule_of(routing: Routing) -> RuleOfRouter:
    two = routing.group_score == "two_largest"
    return RuleOfRouter(
        routing.top_k, routing.scores, routing.renormalise, routing.scale, routing.jitter, routing.groups,
        routing.top_groups, two,
    )  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rows", [1, 9])
def test_the_rule_of_a_router(name: str, rows: int, kernels: CpuKernels) -> None:
    routing = RULES[name]
    torch.manual_seed(len(name))
    logits = 3 * torch.randn(rows, routing.num_experts)
    correction = torch.randn(routing.num_experts) if routing.correction else None
    want_ids, want = choose_experts(logits, routing, correction)
    ids, weights = ExpertFunctions(kernels).route(logits, correction, rule_of(routing))
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", RULES)
def test_logits_that_are_not_finite_choose_experts_that_exist(
    name: str, value: float, kernels: CpuKernels
) -> None:
    routing = RULES[name]
    correction = torch.zeros(routing.num_experts) if routing.correction else None
    ids, _ = ExpertFunctions(kernels).route(
        torch.full((2, routing.num_experts), value), correction, rule_of(routing)
    )
    assert ((ids >= 0) & (ids < routing.num_experts)).all()


def env_with(kernels: CpuKernels, dtype: torch.dtype, shard: ExpertShard = ALL_EXPERTS) -> Env:
    nothing: Any = None
    return Env(nothing, Parallel(), nothing, torch.device("cpu"), dtype, kernels, experts=shard)


def choice_of(rows: int, experts: int = EXPERTS, top_k: int = TOP_K) -> ExpertChoice:
    ids = torch.rand(rows, experts).argsort(1)[:, :top_k]
    return ExpertChoice(ids, torch.rand(rows, top_k))


def plain_weights(hidden: int, width: int, dtype: torch.dtype, biased: bool = False) -> ExpertWeights:
    def some(*shape: int) -> Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)

    biases = (some(EXPERTS, 2 * width), some(EXPERTS, hidden)) if biased else (None, None)
    return ExpertWeights(some(EXPERTS, 2 * width, hidden), some(EXPERTS, hidden, width), *biases)


def reference(weights: ExpertWeights, activation: str, x: Tensor, choice: ExpertChoice) -> Tensor:
    """Compute in fp32, with plain products."""

    def wide(stack: StackedWeight | None) -> Any:
        if stack is None or isinstance(stack, Tensor):
            return None if stack is None else stack.float()
        return stack.dequantised()

    exact = ExpertWeights(*(wide(getattr(weights, field.name)) for field in fields(ExpertWeights)))
    return SortedExperts(LoopedMLPs(exact, gated(activation, None), PlainMatmul))(x.float(), choice)


def few(experts: object) -> CExpertMLPs:
    assert isinstance(experts, FewRowsExperts)
    return experts.few


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got.float() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("sizes", [(48, 32), (40, 24), (72, 19)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_experts(
    dtype: torch.dtype, sizes: tuple[int, int], activation: str, kernels: CpuKernels
) -> None:
    need_packed(dtype)
    torch.manual_seed(0)
    weights = plain_weights(*sizes, dtype, biased=activation == "clamped_swiglu")
    experts = few(make_experts(env_with(kernels, dtype), weights, activation))
    for rows in (0, 1, 2, 5, 8, 30):
        x, choice = torch.randn(rows, sizes[0]).to(dtype), choice_of(rows)
        got = experts(x, choice)
        assert got.shape == x.shape and got.dtype == dtype
        if rows:
            assert_near(
                got, reference(weights, activation, x, choice), 1e-5 if dtype == torch.float32 else 0.02
            )


def stacked(form: str, outputs: int, inputs: int) -> StackedWeight:
    """Return the weights of all experts in one form."""
    single = [FORMS[form](WeightMaker(outputs, inputs, seed)) for seed in range(EXPERTS)]
    names = [field.name for field in fields(single[0]) if isinstance(getattr(single[0], field.name), Tensor)]
    return replace(single[0], **{name: torch.stack([getattr(one, name) for one in single]) for name in names})


CODED = [
    "int8 rows",
    "int8 rounded",
    "int4 of 128",
    "int4 of 32, zeros",
    "int4 of 32, offsets",
    "int8 of 32",
    "mxfp4",
]


@pytest.mark.parametrize("form", CODED)
def test_quantised_experts_stay_packed(form: str, kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    weights = ExpertWeights(stacked(form, 256, 256), stacked(form, 256, 128))
    experts = few(make_experts(env_with(kernels, torch.bfloat16), weights, "silu"))
    assert experts.products.coded
    for rows in (1, 3, 8, 40):
        # Values of the weights are about 1, so the inputs are small enough for activations that are not saturated.
        x, choice = (torch.randn(rows, 256) / 16).bfloat16(), choice_of(rows)
        assert_near(experts(x, choice), reference(weights, "silu", x, choice), 0.03)


def test_experts_without_a_gate(kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    up, down = torch.randn(EXPERTS, 24, 40) / 6, torch.randn(EXPERTS, 40, 24) / 5
    env, act = env_with(kernels, torch.float32), ACTIVATIONS["relu2"]
    looped = LoopedMLPs(ExpertWeights(up, down), act, partial(any_product, env))
    experts = c_expert_mlps(env, looped.gate_up, looped.down, "relu2", gated=False)
    assert experts is not None
    x, choice = torch.randn(5, 40), choice_of(5)
    torch.testing.assert_close(experts(x, choice), SortedExperts(looped)(x, choice), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["bf16", "int4 of 128"])
def test_a_row_does_not_depend_on_the_others(form: str, kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    if form == "bf16":
        need_packed(torch.bfloat16)
        weights = plain_weights(64, 48, torch.bfloat16)
    else:
        weights = ExpertWeights(stacked(form, 256, 128), stacked(form, 128, 128))
    experts = few(make_experts(env_with(kernels, torch.bfloat16), weights, "silu"))
    hidden = weights.down.shape[1]
    x, choice = torch.randn(9, hidden).bfloat16(), choice_of(9)
    alone = [
        experts(x[row : row + 1], ExpertChoice(choice.ids[row : row + 1], choice.weights[row : row + 1]))
        for row in range(9)
    ]
    assert torch.equal(experts(x, choice), torch.cat(alone))


@pytest.mark.parametrize("exchange", ["all-reduce", "all-to-all"])
def test_ranks_add_up(exchange: str, kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    weights = plain_weights(48, 32, torch.float32)
    x, choice = torch.randn(5, 48), choice_of(5)
    total = torch.zeros_like(x)
    for rank in range(4):
        shard = ExpertShard(exchange, rank, 4, EXPERTS)  # type: ignore[arg-type]
        own = slice(shard.held(EXPERTS).start, shard.held(EXPERTS).stop)
        part = ExpertWeights(weights.gate_up[own], weights.down[own])  # type: ignore[index]
        experts = make_experts(env_with(kernels, torch.float32, shard), part, "silu")
        total += few(experts.local if exchange == "all-to-all" else experts)(x, choice)  # type: ignore[attr-defined]
    torch.testing.assert_close(total, reference(weights, "silu", x, choice), rtol=1e-4, atol=1e-5)


def test_many_rows_per_expert_take_the_library(kernels: CpuKernels) -> None:
    weights = plain_weights(48, 32, torch.float32)
    experts = make_experts(env_with(kernels, torch.float32), weights, "silu")
    assert few(experts).takes(choice_of(16)) and not few(experts).takes(choice_of(17))
    x, choice = torch.randn(17, 48), choice_of(17)
    torch.testing.assert_close(
        experts(x, choice), reference(weights, "silu", x, choice), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_experts_are_added(dtype: torch.dtype, kernels: CpuKernels) -> None:
    functions = ExpertFunctions(kernels)
    x, shared = torch.randn(5, 40).to(dtype), torch.randn(5, 40).to(dtype)
    gate = torch.randn(5, 1).to(dtype)
    assert torch.equal(functions.add_shared(x, shared, None), x + shared)
    assert torch.equal(functions.add_shared(x, shared, gate), x + exact_sigmoid(gate) * shared)
    if dtype == torch.bfloat16:
        assert torch.equal(functions.widen(x), x.float())
    torch.testing.assert_close(functions.dots(x, shared[:1]), x @ shared[:1].t())
