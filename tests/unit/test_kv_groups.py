"""Groups of layers: how they are chosen, what they save, and the blocks that they release."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.assembly.memory import memory_planner
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.models.spec import ModelSpec
from quire.types import EngineRequest, KVLayout, KVTensor, SamplingParams
from quire.wiring import wire_engine
from quire.worker.echo_executor import EchoExecutor
from quire.worker.memory.kv_groups import LayerGroups, choose_groups, group_layers, one_group, scratch
from quire.worker.memory.sizing import MemoryPlanner
from tiny import CONFIG

WHOLE = KVLayout.keys_and_values(4, 256, "bfloat16")
LOCAL = KVLayout.keys_and_values(4, 256, "bfloat16", window=1024)
LATENT = KVLayout((KVTensor(1, 576, "bfloat16"),))


def shape(found: LayerGroups) -> list[tuple[int, int | None]]:
    return [(len(group.layers), group.window) for group in found.groups]


def check(layouts: list[KVLayout], found: LayerGroups) -> None:
    """Every layer is in one group, layers of a group never share a part, and a part fits all of its layers."""
    layers = [layer for group in found.groups for layer in group.layers]
    assert sorted(layers) == list(range(len(layouts)))
    for group in found.groups:
        parts = [found.part_of[layer] for layer in group.layers]
        assert len(set(parts)) == len(parts)
    for layer, part in enumerate(found.part_of):
        assert found.parts[part] == layouts[layer].tensors
        window = found.groups[found.group_of[layer]].window
        assert window is None or window == layouts[layer].window


def gemma_4b() -> list[KVLayout]:
    return [WHOLE if index % 6 == 5 else LOCAL for index in range(34)]


def test_layers_with_one_lifetime_are_one_group() -> None:
    for layouts in ([WHOLE] * 28, [LOCAL] * 32, [LATENT] * 27, [WHOLE, LATENT, WHOLE]):
        found = group_layers(layouts, 32_768)
        check(layouts, found)
        assert shape(found) == [(len(layouts), layouts[0].window)]
        assert found.token_bytes == sum(layout.token_bytes for layout in layouts)


@pytest.mark.parametrize(
    ("whole", "local", "expected"),
    [
        (5, 29, [(5, None), *[(5, 1024)] * 5, (4, 1024)]),  # Gemma 3 4B
        (12, 12, [(12, None), (12, 1024)]),  # gpt-oss-20b
        (13, 13, [(13, None), (13, 1024)]),  # Gemma 2 2B
    ],
)
def test_groups_have_equally_many_layers(whole: int, local: int, expected: list) -> None:
    layouts = [WHOLE] * whole + [LOCAL] * local
    random.Random(0).shuffle(layouts)
    found = group_layers(layouts, 32_768)
    check(layouts, found)
    assert shape(found) == expected and len(found.parts) == whole


def test_groups_that_save_too_little_are_not_made() -> None:
    assert shape(group_layers(gemma_4b(), 1024)) == [(34, None)]  # the window is never left
    assert shape(group_layers(gemma_4b(), 1030)) == [(34, None)]
    assert len(group_layers(gemma_4b(), 2048).groups) > 1


def test_layers_of_other_layouts_never_share_a_part() -> None:
    rng = random.Random(1)
    wide = KVLayout.keys_and_values(8, 128, "bfloat16", window=512)
    for _ in range(100):
        layouts = rng.choices([WHOLE, LOCAL, LATENT, wide], k=rng.randrange(1, 20))
        check(layouts, group_layers(layouts, rng.choice([100, 2000, 50_000])))
        check(layouts, one_group(layouts))


def test_entries_that_other_layers_read_are_not_overwritten() -> None:
    """Layers without entries take no memory; without a cache, entries that they read have a part of their own."""
    shared = replace(WHOLE, is_shared=True)
    layouts = [WHOLE, shared, WHOLE, LOCAL, KVLayout(()), KVLayout(())]
    for found in (scratch(layouts), group_layers(layouts, 512)):
        assert found.part_of[4:] == (None, None) and found.part_of[1] not in (
            found.part_of[0],
            found.part_of[2],
        )
    found = scratch(layouts)
    assert found.part_of[0] == found.part_of[2] == found.part_of[3] and len(found.parts) == 2


def test_without_pages_or_a_cache_there_is_one_group() -> None:
    assert shape(choose_groups(gemma_4b(), 32_768, paged=False, keeps_kv=True)) == [(34, None)]
    found = choose_groups(gemma_4b(), 32_768, paged=True, keeps_kv=False)
    assert found == scratch(gemma_4b()) and found.parts == (WHOLE.tensors,)


# ------------------------------------------------------------------------------------ in an engine


GEMMA = replace(
    ModelSpec.from_config(CONFIG), num_layers=34, num_heads=8, num_kv_heads=4, head_dim=256, max_model_len=32_768,
    windows=tuple(layout.window for layout in gemma_4b()),
)  # fmt: skip
MISTRAL = replace(GEMMA, num_layers=32, windows=(4096,) * 32)


def planner(spec: ModelSpec, memory: int, **settings: object) -> tuple[EngineConfig, MemoryPlanner]:
    wanted = EngineConfig(
        max_model_len=spec.max_model_len, kv_cache_memory=memory, prefix_caching=False, check_invariants=False,
        **settings,
    )  # fmt: skip
    config = wanted.resolved(80 << 30, spec.max_model_len)
    return config, memory_planner(
        config, Path("model"), spec, torch.bfloat16, torch.device("cuda"), explicit_len=True
    )


def engine(spec: ModelSpec, memory: int, **settings: object) -> Engine:
    config, plan = planner(spec, memory, **settings)
    size = plan.size_kv(memory)
    return wire_engine(
        config, num_blocks=size.num_blocks, block_size=size.block_size, max_model_len=size.max_model_len,
        executor=EchoExecutor(100, 0, frozenset()), grammar=NoGrammar(), groups=size.groups,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "least"), [(GEMMA, 4.0), (MISTRAL, 4.0)], ids=["Gemma 3 4B", "Mistral 7B v0.1"]
)
def test_requests_of_32k_that_run_at_once(spec: ModelSpec, least: float) -> None:
    """In the memory of ten requests that keep everything, at least four times as many run, none preempted."""
    memory = 10 * 32_768 * sum(layout.token_bytes for layout in spec.kv_layouts("bfloat16"))
    host = engine(spec, memory, max_num_seqs=128)
    params = SamplingParams(max_tokens=600, ignore_eos=True)
    for number in range(100):
        host.add(EngineRequest(str(number), [1] * 32_100, params))
    most = 0
    while not (host.log.totals.pressure or host.log.totals.finished):
        most = max(most, len(host.scheduler.running))
        host.step()
    assert most >= least * 10, f"{most} requests run at once"
    host.scheduler.check()


def test_a_block_that_one_group_releases_serves_another() -> None:
    """The pool holds one request of full length and no more, so the answer lives on released blocks."""
    spec = replace(GEMMA, max_model_len=16_384)
    _, plan = planner(spec, 1 << 40, max_num_batched_tokens=2048)
    needed = plan.request_blocks(16_384) * plan.size_kv(1 << 40).block_bytes
    host = engine(spec, needed, max_num_batched_tokens=2048)
    host.add(EngineRequest("r", [1] * 12_000, SamplingParams(max_tokens=4300, ignore_eos=True)))
    free = []
    while host.has_work:
        host.step()
        free.append(host.scheduler.pool.num_free)
    assert free[-1] == host.scheduler.pool.num_blocks and min(free) >= 0
    everything = len(host.scheduler.blocks.groups) * 16_384 // 16
    assert host.scheduler.pool.num_blocks < everything / 3


def test_a_context_is_lowered_to_what_the_windows_allow() -> None:
    """A request takes memory for its window, not for its context, so a longer one fits."""
    per_token = sum(layout.token_bytes for layout in GEMMA.kv_layouts("bfloat16"))
    budget = 16_000 * per_token
    config = EngineConfig(kv_cache_memory=budget, max_num_batched_tokens=2048).resolved(80 << 30, 32_768)
    memory = memory_planner(
        config, Path("model"), GEMMA, torch.bfloat16, torch.device("cuda"), explicit_len=False
    )
    assert memory.size_kv(budget).max_model_len == 32_768
    plain = replace(memory, groups=one_group(GEMMA.kv_layouts("bfloat16")))
    assert plain.size_kv(budget).max_model_len == 16_000
