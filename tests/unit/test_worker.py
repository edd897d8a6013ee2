"""Workers: the step that measures memory is the largest that can occur, and runners share the slot columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import EngineConfig
from quire.assembly.memory import memory_planner
from quire.assembly.steps import pick_launch
from quire.attention.reference import ReferenceAttention
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import DummyCheckpoint
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from quire.worker.memory.sizing import KVSize
from quire.worker.worker import Worker
from tiny import CONFIG

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 64}, (4, 16)),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 16}, (16, 1)),
        # positions end where the context ends, and the sampled token takes the last: more tokens need more rows
        ({"max_num_seqs": 1, "max_num_batched_tokens": 8192}, (1, 255)),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 8192, "max_model_len": 100}, (2, 99)),
    ],
)
def test_the_largest_step(settings: dict, expected: tuple[int, int]) -> None:
    assert tiny_worker(**settings).largest_step() == expected


def tiny_worker(**settings: object) -> Worker:
    spec, backend = ModelSpec.from_config(CONFIG), ReferenceAttention()
    model = build_model(
        spec, Env(DummyCheckpoint(0, CPU, torch.float32), Parallel(), backend, CPU, torch.float32)
    )
    config = EngineConfig(model="tiny", **settings).resolved(0, spec.max_model_len)
    memory = memory_planner(config, Path("model"), spec, torch.float32, CPU, explicit_len=False)
    return Worker(model, backend, memory, pick_launch(config, memory, backend, depth=1))


def test_runners_share_one_set_of_slot_columns() -> None:
    worker = tiny_worker(max_num_seqs=3)
    size = KVSize(8, 16, 0, 256)
    first = worker.make_runner(size, worker.make_blocks(size), graphs=False).state
    first.tokens.fill_(7)
    second = worker.allocate(size).state
    assert second is first
    assert not second.tokens.any(), "the columns still hold the tokens of a throwaway runner"
    assert second.num_tokens.tolist() == [0, 0, 0, 1] and (second.block_tables[0][second.dummy] == 8).all()
    shorter = worker.allocate(KVSize(8, 16, 0, 128)).state
    assert shorter.tokens.shape == (4, 128 + 1), "the columns are longer than the context that is served"
