"""Bytes and operations of steps against figures computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.attention.expansion_rule import ExpansionRule
from quire.bench.cost import Cost, CostModel, Machine
from quire.bench.metrics import limits
from quire.core.steplog import StepRecord
from quire.layers.routing_params import Routing
from quire.models.spec import ModelSpec, MoESpec
from quire.types import EngineInfo
from tiny import CONFIG

SPEC = ModelSpec.from_config(CONFIG)  # 2 layers, hidden 32, 4 + 2 heads of 16, MLP 48, 260 tokens, tied
QKV = 32 * 16 * (4 + 2 + 2)
LAYER = QKV + 4 * 16 * 32 + 3 * 32 * 48
HEAD = 260 * 32


def info(spec: ModelSpec, dtype: str = "float32") -> EngineInfo:
    size = {"float32": 4, "bfloat16": 2}[dtype]
    return EngineInfo(
        model="tiny", family=spec.family, vocab_size=spec.vocab_size, max_model_len=256, eos_ids=[], device="cpu",
        dtype=dtype, attention="reference", max_num_seqs=4, max_num_batched_tokens=64, num_blocks=8, block_size=16,
        block_bytes=0, weight_bytes=size * spec.num_parameters, num_parameters=spec.num_parameters,
    )  # fmt: skip


def test_a_mixed_step() -> None:
    cost = CostModel(SPEC, info(SPEC)).step([("a", 9, 1), ("b", 4, 3)])
    assert cost.matrix_bytes == 4 * (2 * LAYER + HEAD)
    # behind the attention of the second layer there are only the two tokens that sample
    assert cost.matrix_flops == 2 * (4 * LAYER + 4 * QKV + 2 * (LAYER - QKV) + 2 * HEAD)
    # a sees 10 tokens; b's three see 5, 6 and 7; keys and values of 10 and 7 tokens are moved
    assert cost.attention_bytes == 2 * 2 * (2 * 16) * 4 * (10 + 7)
    assert cost.attention_flops == 2 * 4 * (4 * 16) * (10 + 5 + 6 + 7)


def test_products_are_in_the_order_of_the_model() -> None:
    names = [p.name for p in CostModel(SPEC, info(SPEC)).products([("a", 0, 1)])]
    assert names == ["qkv", "o", "gate_up", "down"] * 2 + ["lm_head"]


def test_a_window_limits_what_is_seen() -> None:
    spec = replace(SPEC, windows=(4, None))
    model = CostModel(spec, info(spec))
    token = 2 * (2 * 16) * 4  # keys and values of one token in one layer
    assert model.step([("a", 9, 1)]).attention_bytes == token * ((4 + 1) + (9 + 1))
    pair = 4 * (4 * 16)
    assert model.step([("a", 2, 4)]).attention_flops == pair * ((3 + 4 + 4 + 4) + (3 + 4 + 5 + 6))


def test_experts_that_nobody_chose_stay_in_memory() -> None:
    routing = Routing(num_experts=8, top_k=2)
    moe = MoESpec(routing=routing, intermediate_size=48, sparse=(True, True))
    spec = replace(SPEC, moe=moe)
    model = CostModel(spec, info(spec))
    expert, rest = 3 * 32 * 48, LAYER - 3 * 32 * 48 + 32 * 8
    one, many = model.step([("a", 0, 1)]), model.step([(str(i), 0, 1) for i in range(1000)])
    assert one.matrix_bytes == pytest.approx(4 * (2 * (rest + 2 * expert) + HEAD))
    assert many.matrix_bytes == pytest.approx(4 * (2 * (rest + 8 * expert) + HEAD))
    assert one.matrix_flops == 2 * (2 * (rest + 2 * expert) + HEAD)


@pytest.mark.parametrize(
    ("name", "weights", "token"),
    [("Qwen--Qwen3-0.6B", 1.19e9, 112), ("meta-llama--Meta-Llama-3.1-8B", 15.01e9, 128)],
)
def test_real_shapes(data: Path, name: str, weights: float, token: int) -> None:
    """The bytes of weights that a step reads, and the KiB of keys and values per token."""
    spec = ModelSpec.from_config(json.loads((data / "configs" / "hf" / f"{name}_config.json").read_text()))
    cost = CostModel(spec, info(spec, "bfloat16")).step([("a", 1023, 1)])
    assert cost.matrix_bytes == pytest.approx(weights, rel=0.01)
    assert cost.attention_bytes == 1024 * token * 1024


def test_latent_attention(data: Path) -> None:
    config = json.loads((data / "configs" / "presets" / "deepseek_v2_lite.json").read_text())
    spec = ModelSpec.from_config({**config, "q_lora_rank": None})
    model = CostModel(spec, info(spec, "bfloat16"))
    cost = model.step([("a", 1023, 1)])
    assert cost.attention_bytes == 1024 * 27 * 576 * 2
    assert cost.attention_flops == 1024 * 27 * 2 * 16 * (576 + 512)
    assert cost.matrix_bytes == pytest.approx(2 * 2.45e9, rel=0.01)  # of the 15.7e9 parameters, for one token
    names = [p.name for p in model.products([("a", 0, 1)])][:5]
    assert names == ["q, kv_a", "absorb", "values", "o", "gate_up"]


def test_latent_rows_are_counted_in_the_form_that_the_rule_picks(data: Path) -> None:
    """A long prompt expands; the last token of another request and a short chunk behind a long past do not."""
    config = json.loads((data / "configs" / "presets" / "deepseek_v2_lite.json").read_text())
    spec = ModelSpec.from_config({**config, "q_lora_rank": None})
    expanding = CostModel(spec, info(spec, "bfloat16"), ExpansionRule(16, 512, 128, 128))
    absorbing = CostModel(spec, info(spec, "bfloat16"))
    prompt, decoding, chunk = ("a", 100, 400), ("b", 1023, 1), ("c", 1000, 100)
    pairs = 400 * 100 + 400 * 401 // 2
    heads, kv_b = 27 * 16, 16 * (128 + 128) * 512

    def conversions(model: CostModel, *rows: tuple[str, int, int]) -> dict[str, tuple[float, float]]:
        """Return bytes and operations by product, of the first layer."""
        return {p.name: (p.bytes, p.flops) for p in model.products(rows)[1:4] if p.name != "o"}

    alone = expanding.step([prompt])
    assert alone.attention_flops == 2 * heads * (128 + 64 + 128) * pairs
    assert absorbing.step([prompt]).attention_flops == 2 * heads * (576 + 512) * pairs
    assert alone.attention_bytes == absorbing.step([prompt]).attention_bytes
    assert conversions(expanding, prompt)["expand"] == (2 * kv_b, 2 * kv_b * 500)
    half = kv_b // 2
    absorbed = {"absorb": (2 * half, 2 * half * 400), "values": (2 * half, 2 * half * 400)}
    assert conversions(absorbing, prompt) == absorbed
    for row in (decoding, chunk):
        assert expanding.step([row]) == absorbing.step([row])
    mixed = expanding.step([prompt, decoding])
    assert mixed.attention_flops == 2 * heads * ((128 + 64 + 128) * pairs + (576 + 512) * 1024)
    assert conversions(expanding, prompt, decoding) == {
        "absorb": (2 * half, 2 * half), "values": (2 * half, 2 * half), "expand": (0, 2 * kv_b * 500),
    }  # fmt: skip


def test_the_floor_is_the_sum_of_two_roofs() -> None:
    machine = Machine("m", bytes_per_s=100.0, flops_per_s=1000.0)
    assert Cost(50, 100, 10, 900).floor_s(machine) == 50 / 100 + 900 / 1000
    assert Cost.total([Cost(1, 2, 3, 4), Cost(1, 1, 1, 1)]) == Cost(2, 3, 4, 5)
    assert Cost.total([]).bytes == 0


def test_limits_of_a_run() -> None:
    model = CostModel(SPEC, info(SPEC))
    record = StepRecord(0, 0.0, [("a", 9, 1)], [], [], 1, 0, None, 0, 1e-6, 2e-6, 3e-6, 4e-6)
    cost = model.step(record.rows)
    machine = Machine("m", bytes_per_s=cost.bytes, flops_per_s=1e30)
    found = limits([record, record], 4.0, model, machine)
    assert found["floor_s"] == pytest.approx(2.0) and found["share_of_limit"] == pytest.approx(0.5)
    assert found["mbu"] == pytest.approx(0.5) and found["mfu"] == pytest.approx(0.0)
    assert found["median_step_us"] == pytest.approx({"schedule": 1, "launch": 2, "wait": 3, "retire": 4})
