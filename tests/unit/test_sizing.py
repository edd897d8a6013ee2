"""Sizes of the KV cache: how many blocks fit, what else takes memory, and contexts that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.assembly.memory import memory_planner
from quire.config import EngineConfig
from quire.layers.mixer_params import ShortConvParams
from quire.models.spec import ModelSpec
from quire.types import ConfigError
from quire.worker.memory import sizing
from quire.worker.memory.sizing import KVSize, MemoryPlanner
from tiny import CONFIG

TOKEN = 2 * 4 * 2 * 64 * 2  # keys and values, layers, KV heads, head_dim, bytes
CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPEC = replace(
    ModelSpec.from_config(CONFIG),
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    windows=(None,) * 4,
    max_model_len=4096,
)


def planner(
    asked: int | None = None,
    *,
    spec: ModelSpec = SPEC,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
    gpu_bytes: int = 0,
    **settings,
) -> MemoryPlanner:
    config = EngineConfig(max_model_len=asked, **settings).resolved(gpu_bytes, spec.max_model_len)
    return memory_planner(config, Path("model"), spec, dtype, device, explicit_len=asked is not None)


def size(budget_tokens: int, asked: int | None = None, device: torch.device = CPU, **settings) -> KVSize:
    """Return the size with a budget for blocks alone, as kv_cache_memory sets it."""
    budget = budget_tokens * TOKEN
    return planner(asked, device=device, kv_cache_memory=budget, **settings).size_kv(budget)


def test_paged() -> None:
    found = size(10_000)
    assert (found.num_blocks, found.block_size, found.block_bytes) == (625, 16, 16 * TOKEN)
    assert found.max_model_len == 4096


def test_no_more_than_is_of_use() -> None:
    assert size(10**9, max_num_seqs=2, device=GPU).num_blocks == 2 * 2 * 4096 // 16
    assert size(10**9, max_num_seqs=2).num_blocks == 2 * 4096 // 16  # on a CPU that memory is left to others


def test_contiguous_has_one_block_per_request() -> None:
    found = size(10_000, kv_layout="contiguous")
    assert (found.num_blocks, found.block_size) == (2, 4096)


def test_no_cache_needs_one_layer_only() -> None:
    found = size(1024, kv_layout="none")
    assert (found.num_blocks, found.block_size, found.block_bytes) == (1, 4096, 4096 * TOKEN // 4)


def test_an_automatic_context_shrinks_to_what_fits() -> None:
    assert size(1000).max_model_len == 992
    assert size(1000, kv_layout="contiguous").max_model_len == 1000


def test_an_explicit_context_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 4000 needs .* MiB of KV cache"):
        size(1000, asked=4000)
    with pytest.raises(ConfigError, match="lower max_model_len or raise kv_cache_memory"):
        size(100)


def test_weights_are_held_against_what_the_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "host_memory", lambda: (1 << 16, 1 << 20))
    with pytest.raises(ConfigError, match=r"the weights of demo need .* are free on cpu"):
        planner(dtype=torch.float32).check_weights_fit()


def test_slot_columns_come_out_of_the_budget_that_was_measured() -> None:
    """At a million tokens and 1,024 rows they take 4.6 GB, more than this budget holds."""
    spec, budget = replace(SPEC, max_model_len=1 << 20), 4 << 30
    memory = planner(spec=spec, device=GPU, gpu_bytes=80 << 30)
    assert memory.column_bytes(1 << 20) > 4.5e9
    found = memory.size_kv(budget)
    assert found.max_model_len == memory.fit_context(budget) < 1 << 20
    used = found.num_blocks * found.block_bytes + memory.column_bytes(found.max_model_len)
    assert 0.99 * budget < used <= budget


def test_log_probabilities_and_changed_logits_are_counted() -> None:
    """Gemma 3 1B: 262,144 tokens, 256 rows. The float32 copy of the logits alone takes 256 MiB."""
    memory = planner(spec=replace(SPEC, vocab_size=262_144), gpu_bytes=8 << 30)
    rows_by_vocab = 256 * 262_144
    assert memory.sampling_bytes() > rows_by_vocab * (2 + 4) + (256 << 20)


def test_an_explicit_cache_beside_which_a_step_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sizing, "free_memory", lambda device: (1 << 30, 1 << 30))
    fits = KVSize(900, 16, 1 << 20, 4096)
    gpu, cpu = (planner(device=device, kv_cache_memory=900 << 20) for device in (GPU, CPU))
    gpu.check_kv_fits(fits, reserved=50 << 20)
    with pytest.raises(ConfigError, match=r"KV cache needs 900 MiB, .* a step 200 MiB"):
        gpu.check_kv_fits(fits, reserved=200 << 20)
    cpu.check_kv_fits(fits, reserved=200 << 20)  # a block takes memory when it is first written
    assert "lower kv_cache_memory" in caplog.text


@pytest.mark.parametrize("free", [40 << 30, 75 << 30])
def test_engines_that_start_on_one_gpu_get_equal_shares_whoever_is_first(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(sizing, "free_memory", lambda device: (free, 100 << 30))
    monkeypatch.setattr(sizing.torch.cuda, "memory_reserved", lambda device: 20 << 30)
    memory = replace(planner(device=GPU, memory_utilization=0.45), shares_gpu=True)
    assert memory.kv_budget(reserved=5 << 30) == pytest.approx((45 - 20 - 5) << 30, abs=9)


def test_blocks_columns_and_a_step_that_fit_exactly_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, found = planner(device=GPU, kv_cache_memory=900 << 20), KVSize(900, 16, 1 << 20, 4096)
    columns = memory.column_bytes(4096)
    assert columns > 0
    monkeypatch.setattr(sizing, "free_memory", lambda device: (columns + (950 << 20), 1 << 40))
    memory.check_kv_fits(found, reserved=50 << 20)
    with pytest.raises(ConfigError, match="lower kv_cache_memory"):
        memory.check_kv_fits(found, reserved=(50 << 20) + 1)


def test_a_step_on_a_cpu_is_estimated_with_activations_and_sampling() -> None:
    memory = planner(max_num_batched_tokens=256)
    longer = planner(max_num_batched_tokens=512)
    activations = memory.cpu_step_bytes() - memory.sampling_bytes()
    assert activations > 256 * 4 * SPEC.hidden_size
    assert longer.cpu_step_bytes() - longer.sampling_bytes() == 2 * activations


def test_an_explicit_context_that_fits_exactly_is_kept() -> None:
    assert size(4000, asked=4000).max_model_len == 4000
    assert size(4096).max_model_len == 4096


HYBRID = replace(
    SPEC,
    mixer=ShortConvParams(channels=1 << 19, width=3),
    mixes=(True, True, False, True),
    attends=(False, False, True, False),
)
STATE = 3 * 2 * (1 << 19) * 2  # layers, taps, channels, bytes


def test_states_are_taken_out_of_the_budget() -> None:
    memory = planner(spec=HYBRID, max_num_seqs=4, prefix_caching=False)
    assert memory.groups.token_bytes == TOKEN // 4  # one layer attends
    states, columns, blocks = 5 * STATE, memory.column_bytes(4096), 4 * 4096 * TOKEN // 4
    found = memory.size_kv(states + columns + blocks)
    assert (found.num_blocks, found.num_snapshots, found.state_bytes) == (4 * 4096 // 16, 0, STATE)
    assert memory.size_kv(states + columns + blocks // 2).num_blocks == 2 * 4096 // 16


def test_snapshots_take_an_eighth_of_the_memory_for_blocks() -> None:
    memory = planner(spec=HYBRID, max_num_seqs=4)
    room = 5 * STATE + memory.column_bytes(4096)
    assert memory.size_kv(room + 80 * STATE).num_snapshots == 10
    assert memory.size_kv(room + (1 << 40)).num_snapshots == 16, "more snapshots than are of use"
    explicit = planner(spec=HYBRID, max_num_seqs=4, state_snapshots=3).size_kv(room + 80 * STATE)
    assert explicit.num_snapshots == 3


def test_states_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"states of max_num_seqs 64 .* lower max_num_seqs"):
        planner(spec=HYBRID, max_num_seqs=64).size_kv(20 * STATE)


def test_drafts_keep_several_states() -> None:
    memory = planner(spec=HYBRID, max_num_seqs=4, spec_method="ngram", spec_tokens=2)
    assert memory.fixed_state_bytes() == (4 * 3 + 1) * STATE


def test_fewer_requests_by_default_where_states_are_large() -> None:
    seqs = [EngineConfig(**more).resolved(80 * 10**9, 4096, 75 << 20).max_num_seqs for more in ({}, DRAFTING)]
    assert seqs == [169, 56]
    assert EngineConfig(max_num_seqs=500).resolved(80 * 10**9, 4096, 75 << 20).max_num_seqs == 500


DRAFTING = {"spec_method": "ngram", "spec_tokens": 2}
