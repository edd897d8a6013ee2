"""The grouped product against its torch reference, and MoE layers with it, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import logging
import random

import pytest
import torch

pytest.importorskip("triton")

from targets import TARGETS, pretend

from quire.kernels import target as targets
from quire.kernels.matmul.grouped import grouped_product
from quire.layers.expert_weights import ExpertWeights
from quire.layers.mlp import gated
from quire.layers.moe import GroupedMLPs, LoopedMLPs, library_product, masked_product, pick_product
from quire.quant.base import PlainMatmul

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled tests cover this")


def compare(rng: random.Random, counts: list[int], outputs: int, inputs: int, like: torch.Tensor) -> None:
    torch.manual_seed(rng.randrange(1000))
    rows, groups = sum(counts), len(counts)
    x = torch.randn(rows, inputs, device=like.device).to(like)
    weight = (torch.randn(groups, outputs, inputs, device=like.device) / inputs**0.5).to(like)
    ends = torch.tensor(counts, device=like.device).cumsum(0).to(torch.int32)
    got = grouped_product(x, weight, ends)
    wanted = masked_product(x.double(), weight.double(), ends)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[like.dtype]
    assert got.dtype == like.dtype and got.shape == (rows, outputs)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bfloat16 products
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capability", [75, 80])
def test_rows_meet_their_groups_weight_interpreted(
    seed: int, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, CPU, capability=capability)
    rng = random.Random(seed)
    counts = [rng.choice([0, 0, 1, 2, 15, 33, 70]) for _ in range(rng.choice([1, 2, 5, 8]))]
    compare(rng, counts, rng.choice([1, 24, 65]), rng.choice([8, 33, 96]), torch.empty(0, dtype=dtype))


def test_the_plain_twin_skips_no_row() -> None:
    x, weight = torch.randn(7, 3), torch.randn(4, 5, 3)
    ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    wanted = torch.cat([x[:2] @ weight[0].t(), x[2:6] @ weight[2].t(), x[6:] @ weight[3].t()])
    torch.testing.assert_close(masked_product(x, weight, ends), wanted)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_multiplies_only_where_it_does_not_wait(
    capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setitem(targets.KNOWN_TARGETS, device, TARGETS[capability])
    targets.log_choice.cache_clear()
    with caplog.at_level(logging.WARNING):
        picked = {pick_product(device, dtype, 64, 96) for _ in range(3)}
    fast = capability in (90, 100) and dtype == torch.bfloat16
    assert picked == {library_product if fast else grouped_product}
    assert len(caplog.records) == (0 if fast else 1)
    assert pick_product(device, dtype, 64, 90) is grouped_product  # sizes that the library refuses


# ----------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capability", [75, 90])
def test_rows_meet_their_groups_weight(
    seed: int, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, torch.device("cuda", 0), capability=capability)
    rng = random.Random(seed)
    counts = [rng.choice([0, 0, 1, 2, 15, 33, 500]) for _ in range(rng.choice([1, 8, 60, 128]))]
    sizes = rng.choice([(1536, 2048), (2048, 768), (65, 33), (96, 1000)])
    compare(rng, counts, *sizes, torch.empty(0, dtype=dtype, device="cuda:0"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_can_be_captured_and_serve_any_mix(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(16, 256, 128, device="cuda") / 11).to(dtype)
    down = (torch.randn(16, 128, 128, device="cuda") / 11).to(dtype)
    silu = gated("silu", None)
    experts = GroupedMLPs(ExpertWeights(gate_up, down), silu, grouped_product)
    looped = LoopedMLPs(ExpertWeights(gate_up.float(), down.float()), silu, PlainMatmul)
    x, ids = torch.randn(96, 128, device="cuda").to(dtype), torch.zeros(96, dtype=torch.int64, device="cuda")
    experts(x, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, ids)
    for _ in range(5):
        ids.copy_(torch.randint(16, (96,), device="cuda").sort().values)
        x.normal_()
        graph.replay()
        wanted = looped(x.float(), ids)
        assert (out.float() - wanted).norm() / wanted.norm() < (1e-4 if dtype == torch.float32 else 1e-2)
