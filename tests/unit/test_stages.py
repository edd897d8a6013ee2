"""The parts of a pipeline: the split of layers, places of ranks, memory of a stage, and tokens that arrive late."""

from __future__ import annotations

from collections import deque
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from quire.assembly.stages import layer_counts, pick_place, pick_stage, weight_share
from quire.config import EngineConfig
from quire.frontend.location import locate_model
from quire.models.config.load import load_spec
from quire.parallel.stage import Stage, split_layers
from quire.types import REJECTED, ConfigError, KVLayout, StateLayout, StateTensor, StepPlan
from quire.worker.memory.kv_groups import group_layers, held_by, scratch
from quire.worker.memory.states import StateMemory
from quire.worker.stage import ArrivedTokens, TokenRelay, append_tokens
from quire.worker.staging import Staging
from quire.worker.state import SlotState

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sizes", "first", "last", "stages", "counts"),
    [
        ([1] * 8, 0, 0, 2, (4, 4)),
        ([1] * 7, 0, 0, 2, (3, 4)),
        ([2] * 8, 4, 4, 4, (1, 3, 3, 1)),
        ([1, 9, 1, 1, 1, 1], 0, 0, 2, (2, 4)),
        ([1] * 3, 0, 9, 3, (1, 1, 1)),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(sizes, first, last, stages, counts) -> None:
    found = split_layers(sizes, first, last, stages)
    assert found == counts

    def largest(counts: tuple[int, ...]) -> int:
        ends = np.cumsum((0, *counts))
        loads = [sum(sizes[a:b]) for a, b in pairwise(ends)]
        return max(load + (i == 0) * first + (i == stages - 1) * last for i, load in enumerate(loads))

    every = (c for c in product(range(1, len(sizes) + 1), repeat=stages) if sum(c) == len(sizes))
    assert largest(found) == min(map(largest, every))


def test_rank_0_is_in_the_last_stage_and_every_layer_in_one() -> None:
    config = EngineConfig(pipeline_parallel_size=3, tensor_parallel_size=2)
    spec = load_spec(locate_model("demo").path)
    places = [pick_place(config, rank) for rank in range(config.num_ranks)]
    assert [(place.stage, place.shard) for place in places] == [
        (2, 0),
        (2, 1),
        (1, 0),
        (1, 1),
        (0, 0),
        (0, 1),
    ]
    assert places[0].column(1) == [5, 3, 1] and places[0].tensor_group(0) == [4, 5]
    stages = [pick_stage(config, spec, places[rank]) for rank in (4, 2, 0)]
    assert [i for stage in stages for i in stage.layers(spec.num_layers)] == list(range(spec.num_layers))
    # A tied table is in the first and in the last stage.
    table = spec.vocab_size * spec.hidden_size / spec.num_parameters
    assert sum(weight_share(spec, stage) for stage in stages) == pytest.approx(
        1 + table * spec.tie_embeddings
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"pipeline_parallel_size": 9},
            "pipeline_parallel_size 9 needs a layer for each stage, but demo has 7 layers",
        ),
        ({"pipeline_parallel_size": 2, "pipeline_layer_split": "3,3"}, "3,3 has 6 layers, but demo has 7"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_split": "7"}, "must be 2 numbers above 0"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_split": "7,0"}, "must be 2 numbers above 0"),
        ({"pipeline_parallel_size": 0}, "must be an integer of at least 1"),
    ],
)
def test_splits_that_cannot_be_are_refused_with_their_numbers(settings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layer_counts(EngineConfig(**settings), load_spec(locate_model("demo").path))


def test_a_stage_has_memory_for_its_layers_only() -> None:
    """Groups stay those of the whole model, so that all stages have the same block tables."""
    windows = [8, 8, 8, None, 8, 8, 8, None]
    layouts = [KVLayout.keys_and_values(2, 4, "float32", window) for window in windows]
    whole = group_layers(layouts, 4096, [range(4), range(4, 8)])
    stages = [held_by(whole, range(4)), held_by(whole, range(4, 8))]
    assert len(whole.groups) > 1
    for stage, own in zip(stages, (range(4), range(4, 8))):
        assert stage.groups == whole.groups and stage.group_of == whole.group_of
        assert [layer for layer, part in enumerate(stage.part_of) if part is not None] == list(own)
        for group in stage.groups:  # no two layers of a group write to the same part
            parts = [stage.part_of[layer] for layer in group.layers if layer in own]
            assert len(set(parts)) == len(parts)
        assert stage.token_bytes * 2 == whole.token_bytes
    assert held_by(scratch(layouts), range(4)).token_bytes == scratch(layouts).token_bytes


class FakeLink:
    """A link whose published tokens are in a list."""

    is_muted = False

    def __init__(self, stages: int) -> None:
        self.stage, self.arrived = Stage(0, stages), deque[torch.Tensor]()

    def collect(self, rows: int, width: int) -> torch.Tensor:
        tokens = self.arrived.popleft()
        assert tokens.shape == (rows, width)
        return tokens


def plan(slots: list[int], samples: list[bool] | None = None, drafts: list[int] | None = None) -> StepPlan:
    count = len(slots)
    drafted = np.array(drafts or [0] * count, np.int32)
    return StepPlan(
        step=0,
        slots=np.array(slots, np.int32),
        num_tokens=1 + drafted,
        num_drafts=drafted,
        starts=np.zeros(count, np.int32),
        samples=np.array([True] * count if samples is None else samples),
        admissions=[],
        new_blocks=np.empty((0, 4), np.int32),
        total_tokens=count,
    )


def test_tokens_are_received_when_a_row_reads_them_or_after_as_many_steps_as_stages() -> None:
    relay = TokenRelay(link := FakeLink(3))  # type: ignore[arg-type]
    link.arrived.extend(torch.tensor([[n]], dtype=torch.int32) for n in range(9))

    def received(slots: list[int], samples: list[bool] | None = None) -> list[int]:
        return [int(arrived.tokens) for arrived in relay.before(plan(slots, samples))]

    assert received([0]) == []
    assert received([1]) == []
    assert received([0]) == [0]  # the host has seen step 0, because only two steps are between
    assert received([2], [False]) == []
    assert received([2], [False]) == [1]  # old
    assert received([2]) == [2]


def test_tokens_of_a_slot_with_a_new_owner_are_dropped() -> None:
    relay = TokenRelay(link := FakeLink(2))  # type: ignore[arg-type]
    link.arrived.append(torch.tensor([[5], [6]], dtype=torch.int32))
    assert not list(relay.before(plan([0, 1])))
    relay._owned_since[0] = 2  # admitted in the next step
    (arrived,) = relay.before(plan([1]))
    assert arrived.rows.tolist() == [1]


def test_arrived_tokens_are_appended_and_rejected_drafts_taken_back() -> None:
    state = SlotState(3, 8, 2, keeps_kv=True, device=CPU)
    state.num_tokens[:3] = torch.tensor([2, 5, 8], dtype=torch.int32)
    state.num_computed[:3] = torch.tensor([5, 5, 8], dtype=torch.int32)  # slot 0 counted three drafts
    state.tokens[:] = 9
    tokens = torch.tensor(
        [[4, 3, REJECTED, REJECTED], [-1, REJECTED, REJECTED, REJECTED], [1, REJECTED, REJECTED, REJECTED]]
    )
    arrived = ArrivedTokens(plan([0, 1, 2], drafts=[3, 0, 0]), tokens.int(), np.array([0, 1]))
    states = StateMemory([StateLayout((StateTensor("x", (1,), "float32"),))], 3, 0, CPU, drafts=3)
    append_tokens(state, states, arrived, Staging(CPU, 1))
    assert states.turn[:3].tolist() == [2, 0, 0], "the state behind the last accepted token"
    assert state.tokens[0, :6].tolist() == [9, 9, 4, 3, 9, 9]
    assert state.tokens[1, 4:7].tolist() == [9, 0, 9]  # a failure is a valid id
    assert (state.tokens[2] == 9).all(), "the row's slot has another owner"
    assert state.num_tokens[:3].tolist() == [4, 6, 8]
    assert state.num_computed[:3].tolist() == [3, 5, 8]
