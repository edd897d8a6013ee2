"""The routing rules and the layouts of experts against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.kernels.experts.choice import ExpertChoice
from quire.layers.env import Env, StoredShape
from quire.layers.expert_weights import load_experts, load_interleaved_experts
from quire.layers.moe import Experts, make_experts
from quire.layers.routing import choose_experts, make_router
from quire.layers.routing_params import Routing
from quire.parallel.ranks import Parallel

transformers = pytest.importorskip("transformers", reason="transformers makes the reference routers")

EXPERTS, HIDDEN, WIDTH = 12, 24, 20
CPU = torch.device("cpu")


class TensorWeights:
    """Weights held in a dictionary."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), cols: slice = slice(None)
    ) -> torch.Tensor:
        found = self.tensors[name]
        assert found.shape == shape
        return found[(rows, cols)[: found.dim()]]

    def stored(self, name: str) -> StoredShape | None:
        found = self.tensors.get(name)
        return None if found is None else StoredShape(found.dtype, tuple(found.shape))

    def copy_into(self, destination: torch.Tensor, *args: Any) -> None:
        destination.copy_(self.tensor(*args))

    def when_loaded(self, action: Callable[[], None]) -> None:
        action()


def env(tensors: dict[str, torch.Tensor], parallel: Parallel | None = None) -> Env:
    return Env(TensorWeights(tensors), parallel or Parallel(), None, CPU, torch.float32)  # type: ignore[arg-type]


GROUPED = {"n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "n_group": 4, "topk_group": 2}
RULES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2Moe", {"num_experts": EXPERTS, "norm_topk_prob": False}, {}),
    "qwen3": ("Qwen3Moe", {"num_experts": EXPERTS, "norm_topk_prob": True}, {"renormalise": True}),
    "gpt-oss": ("GptOss", {"num_local_experts": EXPERTS}, {"renormalise": True, "bias": True}),
    "deepseek-v2": (
        "DeepseekV2",
        {**GROUPED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        {"groups": 4, "top_groups": 2, "scale": 16.0},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**GROUPED, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {
            "scores": "sigmoid", "correction": True, "renormalise": True, "scale": 2.5, "groups": 4, "top_groups": 2,
            "group_score": "two_largest",
        },
    ),
    "glm4": (
        "Glm4Moe",
        {**GROUPED, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
        {"scores": "sigmoid", "correction": True, "renormalise": True, "scale": 1.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_routers(case: str) -> None:
    name, settings, rule = RULES[case]
    module = getattr(transformers.models, name_of(name))
    config = getattr(transformers, name + "Config")(
        hidden_size=HIDDEN, num_attention_heads=4, num_experts_per_tok=4, **settings
    )
    router_class = next(
        getattr(modeling(module, name), name + kind)
        for kind in ("TopKRouter", "TopkRouter")
        if hasattr(modeling(module, name), name + kind)
    )
    reference = router_class(config).float()
    torch.manual_seed(len(case))
    tensors = {"gate.weight": torch.randn(EXPERTS, HIDDEN) / 3}
    reference.weight.data.copy_(tensors["gate.weight"])
    for ours, theirs in (("gate.bias", "bias"), ("gate.e_score_correction_bias", "e_score_correction_bias")):
        if hasattr(reference, theirs):
            tensors[ours] = torch.randn(EXPERTS) / 3
            getattr(reference, theirs).data.copy_(tensors[ours])
    x = torch.randn(50, HIDDEN)
    with torch.inference_mode():
        _, wanted, wanted_ids = reference(x)
        rule = Routing(num_experts=EXPERTS, top_k=4, **rule)
        choice = make_router(env(tensors), "gate", HIDDEN, rule)(x)
    ids, weights = choice.ids, choice.weights
    dense = torch.zeros(50, EXPERTS).scatter(1, ids, weights)
    torch.testing.assert_close(dense, torch.zeros(50, EXPERTS).scatter(1, wanted_ids, wanted))
    assert (weights > 0).all() and len({tuple(sorted(row)) for row in ids.tolist()}) > 10


def name_of(name: str) -> str:
    """Return the module of a class: Qwen2Moe is in qwen2_moe."""
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def modeling(module: Any, name: str) -> Any:
    return getattr(module, "modeling_" + name_of(name))


def test_the_first_of_equal_scores_and_a_row_that_is_not_finite() -> None:
    logits = torch.zeros(2, 8)
    logits[1] = float("nan")
    ids, weights = choose_experts(logits, Routing(num_experts=8, top_k=3, renormalise=True))
    assert all(len(set(row)) == 3 for row in ids.tolist()) and int(ids.max()) < 8
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3) and weights[1].isnan().all()


# -------------------------------------------------------------------------------------------- experts


def run(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:2] for i in range(9)])
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(3))
    return experts(x, ExpertChoice(ids, weights))


@pytest.mark.parametrize("size", [1, 2])
def test_stacked_experts_equal_single_ones(size: int) -> None:
    """With two ranks the partial results sum to the whole."""
    torch.manual_seed(0)
    gate, up = torch.randn(2, 5, WIDTH, HIDDEN)
    down, x = torch.randn(5, HIDDEN, WIDTH), torch.randn(9, HIDDEN)
    single = {
        f"experts.{i}.{name}.weight": one[i]
        for i in range(5)
        for name, one in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
    }
    stacked = {"experts.gate_up_proj": torch.cat((gate, up), 1), "experts.down_proj": down}
    outs = []
    for tensors in (single, stacked):
        parts = [env(tensors, Parallel(rank, size)) for rank in range(size)]
        experts = [make_experts(e, load_experts(e, "experts.", 5, HIDDEN, WIDTH), "silu") for e in parts]
        outs.append(torch.stack([run(one, x) for one in experts]).sum(0))
    torch.testing.assert_close(outs[0], outs[1])
    assert outs[0].std() > 1


@pytest.mark.parametrize("size", [1, 2])
def test_experts_of_gpt_oss(size: int) -> None:
    """Interleaved gate and up, biases and the clamped activation; values beyond the limit of 7 occur."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=5)
    config._experts_implementation = "eager"
    reference = GptOssExperts(config)
    torch.manual_seed(0)
    tensors = {}
    for name, parameter in reference.named_parameters():
        parameter.data.normal_(0, 1.5)
        tensors["experts." + name] = parameter.data
    x = torch.randn(9, HIDDEN)
    parts = [env(tensors, Parallel(rank, size)) for rank in range(size)]
    loaded = [load_interleaved_experts(e, "experts.", 5, HIDDEN, WIDTH) for e in parts]
    experts = [make_experts(e, w, "clamped_swiglu") for e, w in zip(parts, loaded)]

    def by_reference(x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        return reference(x, choice.ids, choice.weights)

    with torch.inference_mode():
        wanted = run(by_reference, x)
        torch.testing.assert_close(sum(run(one, x) for one in experts), wanted, rtol=1e-4, atol=1e-3)
    assert (x @ loaded[0].gate_up[0].t()).abs().max() > 10
