"""Shared experts stacked behind the routed ones compute what they compute as an MLP of their own.

Without a GPU the kernels run in Triton's interpreter, in fp16.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from quire.attention.reference import ReferenceAttention
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import DummyCheckpoint
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from quire.quant.spec import QuantSpec

pytest.importorskip("triton")
from quire.layers import moe, routing, shared_experts
from quire.models import moe as layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "decoder_sparse_step": 1,
}  # fmt: skip
FAMILIES = {
    "gate": {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 9, "shared_expert_intermediate_size": 64},
    "no gate": {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "head_dim": 32,
    },
}  # fmt: skip


class WideCheckpoint(DummyCheckpoint):
    """Weights so large that a missing expert changes the result."""

    STD = 0.15


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers on a CPU use the kernels of experts."""
    for module in (moe, routing, shared_experts):
        monkeypatch.setattr(module, "fuses_experts", lambda device, dtype: True)


def build(family: str, quantization: QuantSpec | None = None) -> moe.MoE:
    spec = ModelSpec.from_config({**SIZES, **FAMILIES[family]})
    weights = WideCheckpoint(0, DEVICE, torch.float16)
    env = Env(weights, Parallel(), ReferenceAttention(), DEVICE, torch.float16, quantization=quantization)
    return layers.make_moe(env, spec, "model.layers.0.")


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("tokens", [1, 3, 19])
@pytest.mark.parametrize("convert", [None, "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_shared_experts(
    family: str, convert: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = None if convert is None else QuantSpec(method=convert, convert=convert)
    stacked = build(family, quantization)
    monkeypatch.setattr(layers, "stack_shared", lambda *args: None)
    apart = build(family, quantization)
    assert stacked.shared is None and apart.shared is not None
    x = torch.randn(tokens, 128, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(tokens)).half()
    want, got, routed = apart(x), stacked(x), apart.experts(x, apart.router(x))
    error = (got - want).float().norm() / want.float().norm()
    # In FP8 the columns of each stacked expert have scales of their own, and inputs are not rounded.
    assert error < (0.05 if convert else 0.01), error
    assert (routed - want).float().norm() > 0.1 * want.float().norm()


@pytest.mark.usefixtures("with_kernels")
def test_shared_experts_in_another_format_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ checkpoints, for one, may leave the shared experts plain."""
    convert = QuantSpec(method="fp8", convert="fp8")
    kept = r"shared_expert\.|\.(gate|shared_expert_gate)\.weight$"
    monkeypatch.setattr("quire.quant.formats.convert._KEPT", re.compile(kept))
    layer = build("gate", convert)
    assert layer.shared is not None
    x = torch.randn(2, 128, device=DEVICE).half()
    assert layer(x).isfinite().all()


@pytest.mark.usefixtures("with_kernels")
def test_shared_experts_of_another_width_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES["gate"], "shared_expert_intermediate_size", 80)
    assert build("gate").shared is not None
