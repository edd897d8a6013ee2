"""Checkpoints: reading, rejections and their messages; dummy weights; sharding over ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.layers.env import Env, Weights
from quire.layers.expert_weights import ExpertWeights, load_experts
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, gated
from quire.layers.moe import (
    GroupedMLPs,
    LoopedMLPs,
    MoE,
    SortedExperts,
    library_product,
    make_experts,
    masked_product,
)
from quire.layers.routing import make_router
from quire.layers.routing_params import Routing
from quire.models.checkpoint.checked import CheckedCheckpoint
from quire.models.checkpoint.checkpoint import DummyCheckpoint, open_checkpoint
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from quire.quant.base import PlainMatmul, make_matmul
from quire.types import ModelError

torch.set_num_threads(1)
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
SPEC = ModelSpec.from_config(CONFIG)


class NoAttention:
    name = "none"
    forward_packed = None
    reads_shared = False

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return ()

    def plan(self, batch: Any) -> Any:
        return None

    def forward(self, layer: Any, q: Any, k: Any, v: Any, batch: Any) -> torch.Tensor:
        raise AssertionError("not in these tests")


@dataclass(frozen=True, slots=True)
class PartialRank(Parallel):
    """A rank whose partial results the test sums up."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def env(weights: Weights, parallel: Parallel | None = None, dtype: torch.dtype = torch.float32) -> Env:
    return Env(weights, parallel or Parallel(), NoAttention(), CPU, dtype)


class Recorder(DummyCheckpoint):
    """Dummy weights that record the requested tensors, which are all tensors of a model's checkpoint."""

    def __init__(self) -> None:
        super().__init__(1, CPU, torch.float32)
        self.seen: dict[str, torch.Tensor] = {}

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), cols: slice = slice(None)
    ) -> torch.Tensor:
        self.seen[name] = super().tensor(name, shape).clone()
        return super().tensor(name, shape, rows, cols)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    recorder = Recorder()
    build_model(SPEC, env(recorder))
    return recorder.seen


def load(folder: Path) -> Any:
    weights = open_checkpoint(folder, SPEC)
    model = build_model(SPEC, env(weights))
    weights.finish()
    return model


def test_everything_is_read_and_harmless_extras_are_ignored(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**tensors, **extras}, tmp_path / "model.safetensors")
    load(tmp_path)


def test_unused_tensors_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(16) for i in range(5)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias.* and 2 more"
    ):
        load(tmp_path)


def test_missing_and_misshaped_tensors_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    found = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.down_proj\.weight.*\[16, 24\]"):
        load(tmp_path)
    save_file({**tensors, name: found.t().contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape \[24, 16\].*asks for \[16, 24\]"):
        load(tmp_path)
    save_file({**tensors, name: found.to(torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="dtype I32"):
        load(tmp_path)


def test_damaged_files_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    whole = file.read_bytes()
    for damaged in (b"", whole[:5], whole[:100], whole[:-1], b"\xff" * 64, whole + b"xx"):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
            load(tmp_path)


def test_shards(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    where = {n: file for file, part in halves.items() for n in part}
    index.write_text(json.dumps({"weight_map": where}))
    load(tmp_path)
    index.write_text(json.dumps({"weight_map": {**where, "ghost": "a.safetensors"}}))
    with pytest.raises(ModelError, match="lacks tensor ghost"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {**where, "ghost": "c.safetensors"}}))
    with pytest.raises(ModelError, match=r"names c\.safetensors, which is missing"):
        load(tmp_path)
    for broken in ("{", "[]", "{}", '{"weight_map": {"x": "../y.safetensors"}}'):
        index.write_text(broken)
        with pytest.raises(ModelError, match=r"index\.json"):
            load(tmp_path)
    index.unlink()
    load(tmp_path)  # shards without an index


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a folder"):
        open_checkpoint(tmp_path / "none", SPEC)
    with pytest.raises(ModelError, match="holds no weights"):
        open_checkpoint(tmp_path, SPEC)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        ModelError, match=r"pickled weights \(pytorch_model\.bin\).*convert them to safetensors"
    ):
        open_checkpoint(tmp_path, SPEC)


def test_a_stored_head_that_differs_from_the_tied_embedding_is_reported(
    tmp_path: Path, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(SPEC, tie_embeddings=True)
    for change, says in ((0.0, ""), (1.0, "lm_head.weight differs from model.embed_tokens.weight")):
        head = tensors["model.embed_tokens.weight"].clone()
        head[7, 3] += change
        save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
        weights = open_checkpoint(tmp_path, spec)
        build_model(spec, env(weights))
        caplog.clear()
        weights.finish()
        assert says in caplog.text and bool(caplog.records) == bool(says)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norms_embeddings_and_head_that_are_not_finite_are_reported(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: float,
) -> None:
    tensors[name].view(-1)[5] = value
    tensors["model.layers.0.input_layernorm.weight"][:] = 3e38  # whose sum overflows
    save_file(tensors, tmp_path / "model.safetensors")
    weights = CheckedCheckpoint(open_checkpoint(tmp_path, SPEC))
    build_model(SPEC, env(weights))
    weights.finish()
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: not finite in the model's dtype (NaN or infinity); requests that use such a value will fail"
    ]


def test_only_the_asked_part_is_returned(tmp_path: Path) -> None:
    tensor = torch.arange(48.0).view(8, 6)
    save_file({"x": tensor, "y": tensor[0].clone()}, tmp_path / "model.safetensors")
    weights = open_checkpoint(tmp_path, SPEC)
    assert torch.equal(weights.tensor("x", (8, 6)), tensor)
    assert torch.equal(weights.tensor("x", (8, 6), slice(2, 5), slice(1, 3)), tensor[2:5, 1:3])
    assert torch.equal(weights.tensor("y", (6,), slice(2, 4)), tensor[0, 2:4])
    assert weights.has("x") and not weights.has("z")


# --------------------------------------------------------------------------------------------- dummy


def test_dummy_weights_depend_on_seed_and_name_alone() -> None:
    one, two, other = (DummyCheckpoint(seed, CPU, torch.float32) for seed in (1, 1, 2))
    whole = one.tensor("a.weight", (300, 50))
    assert torch.equal(whole, two.tensor("a.weight", (300, 50)))
    assert torch.equal(
        whole[100:200, 10:20], two.tensor("a.weight", (300, 50), slice(100, 200), slice(10, 20))
    )
    assert not torch.equal(whole, one.tensor("b.weight", (300, 50)))
    assert not torch.equal(whole, other.tensor("a.weight", (300, 50)))
    assert 0.018 < float(whole.std()) < 0.022
    assert abs(float(one.tensor("norm.weight", (64,)).mean()) - 1) < 0.02
    assert abs(float(one.tensor("x.bias", (64,)).mean())) < 0.02


def test_dummy_wraps_around_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DummyCheckpoint, "BLOCK", 101)
    dummy = DummyCheckpoint(0, CPU, torch.float32)
    flat = dummy.tensor("x.weight", (60, 7)).flatten()
    assert torch.equal(flat[:101], flat[101:202])
    assert torch.equal(dummy.tensor("x.weight", (60, 7), slice(20, 30)).flatten(), flat[140:210])


# ---------------------------------------------------------------------------------- layers and ranks


def test_merged_linear_and_its_cuts() -> None:
    weights = DummyCheckpoint(3, CPU, torch.float32)
    x = torch.randn(5, 12)
    parts = [weights.tensor(f"{n}.weight", (size, 12)) for n, size in (("q", 8), ("k", 4))]
    biases = [weights.tensor(f"{n}.bias", (size,)) for n, size in (("q", 8), ("k", 4))]
    expected = x @ torch.cat(parts).t() + torch.cat(biases)
    whole = Linear(env(weights), ["q", "k"], 12, [8, 4], bias=True)
    assert torch.allclose(whole(x), expected, atol=1e-6)
    ranks = [
        Linear(env(weights, PartialRank(r, 2)), ["q", "k"], 12, [8, 4], bias=True, cut="rows")(x)
        for r in (0, 1)
    ]
    joined = torch.cat((ranks[0][:, :4], ranks[1][:, :4], ranks[0][:, 4:], ranks[1][:, 4:]), 1)
    assert torch.allclose(joined, expected, atol=1e-6)
    single = Linear(env(weights), "q", 12, 8, bias=True)(x)
    summed = sum(
        Linear(env(weights, PartialRank(r, 2)), "q", 12, 8, bias=True, cut="cols")(x[:, 6 * r : 6 * r + 6])
        for r in (0, 1)
    )
    assert torch.allclose(single, summed, atol=1e-6)


class DoublingRank(Parallel):
    """A rank whose reduction doubles its argument, so that the test can tell whether it ran."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize(
    ("cut", "size", "factor"), [("cols", 2, 2), ("cols", 1, 1), ("rows", 2, 1), (None, 2, 1)]
)
def test_only_parts_of_inputs_are_summed(cut: Any, size: int, factor: int) -> None:
    weights, x = DummyCheckpoint(3, CPU, torch.float32), torch.randn(5, 12)
    part = Linear(env(weights, DoublingRank(0, size)), "q", 12, 8, cut=cut)
    x = x[:, : part.in_features]
    stored = weights.tensor("q.weight", (8, 12))[: part.out_features, : part.in_features]
    assert torch.allclose(part(x), factor * (x @ stored.t()), atol=1e-6)


def test_transposed_linear_holds_three_parts() -> None:
    weights = DummyCheckpoint(3, CPU, torch.float32)
    x = torch.randn(5, 6)
    stored = weights.tensor("c_attn.weight", (6, 12))
    whole = Linear(env(weights), "c_attn", 6, [4, 4, 4], transposed=True)
    assert torch.allclose(whole(x), x @ stored, atol=1e-6)
    second = Linear(env(weights, PartialRank(1, 2)), "c_attn", 6, [4, 4, 4], transposed=True, cut="rows")
    assert torch.allclose(second(x), (x @ stored)[:, [2, 3, 6, 7, 10, 11]], atol=1e-6)


def test_ranks_sum_to_the_whole_mlp_and_experts() -> None:
    weights = DummyCheckpoint(5, CPU, torch.float32)
    x = torch.randn(7, 12) * 5

    def mlp(parallel: Parallel) -> torch.Tensor:
        return GatedMLP(env(weights, parallel), "mlp.", 12, 16, "silu")(x)

    def moe(parallel: Parallel) -> torch.Tensor:
        around = env(weights, parallel)
        router = make_router(around, "moe.gate", 12, Routing(num_experts=4, top_k=2, renormalise=True))
        experts = make_experts(around, load_experts(around, "moe.experts.", 4, 12, 16), "silu")
        return MoE(router, experts, parallel)(x)

    for layer in (mlp, moe):
        assert torch.allclose(
            layer(Parallel()), layer(PartialRank(0, 2)) + layer(PartialRank(1, 2)), atol=1e-6
        )


def test_attention_layers_know_their_window_and_scale() -> None:
    config = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 3.0, "head_dim": 8}
    config |= {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    model = build_model(ModelSpec.from_config(config), env(DummyCheckpoint(0, CPU, torch.float32)))
    assert [layer.index for layer in model.attention_layers] == [0, 1]
    assert [layer.window for layer in model.attention_layers] == [5, None]
    layer = model.attention_layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4, 2, 8)
    assert (layer.scale, layer.soft_cap) == (0.25, None)  # transformers ignores that field too
    assert model.logits(torch.zeros(0, 16)).shape == (0, 20)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot be sharded over 8 ranks"):
        build_model(SPEC, env(DummyCheckpoint(0, CPU, torch.float32), PartialRank(0, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_implementations_agree(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = ExpertWeights(torch.randn(4, 32, 24).to(dtype), torch.randn(4, 24, 16).to(dtype))
    ids = torch.tensor([0, 0, 2, 2, 2, 3])  # expert 1 has no tokens
    x = torch.randn(6, 24).to(dtype)
    silu = gated("silu", None)
    looped = LoopedMLPs(weights, silu, PlainMatmul)(x, ids).float()
    tolerance = 1e-4 if dtype == torch.float32 else 2.0
    for product in (library_product, masked_product) if dtype == torch.bfloat16 else (masked_product,):
        grouped = GroupedMLPs(weights, silu, product)(x, ids).float()
        assert torch.allclose(looped, grouped, atol=tolerance, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_is_not_finite_changes_no_other_in_experts(dtype: torch.dtype) -> None:
    weights = DummyCheckpoint(5, CPU, dtype)
    around = env(weights, dtype=dtype)
    router = make_router(around, "moe.gate", 32, Routing(num_experts=4, top_k=2, renormalise=True))
    looped = make_experts(around, load_experts(around, "moe.experts.", 4, 32, 16), "silu")
    stacked = ExpertWeights(torch.randn(4, 32, 32).to(dtype), torch.randn(4, 32, 16).to(dtype))
    clean = torch.randn(9, 32).to(dtype)
    product = library_product if dtype == torch.bfloat16 else masked_product
    for experts in (looped, SortedExperts(GroupedMLPs(stacked, gated("silu", None), product))):
        moe = MoE(router, experts, around.parallel)
        want = moe(clean)
        for value in (float("nan"), float("inf")):
            sick = clean.clone()
            sick[4, 3] = value
            got = moe(sick)
            assert torch.equal(got[:4], want[:4]) and torch.equal(got[5:], want[5:])
            assert not got[4].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_product_equals_the_plain_one_for_any_number_of_rows(dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype), torch.randn(33, 64).to(dtype)
    packed, plain = make_matmul(weight, bias, None), PlainMatmul(weight, bias)
    whole = packed(x)
    assert torch.allclose(whole.float(), plain(x).float(), atol=1e-4 if dtype == torch.float32 else 0.1)
    strided = torch.stack((x, x), -1)[..., 0]
    assert torch.equal(packed(strided), whole)
    for rows in (1, 2, 3, 8, 17):
        assert torch.equal(packed(x[:rows]), whole[:rows])
