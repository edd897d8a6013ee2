"""The step that a worker measures its memory with is the largest that can occur, and one that can occur."""

from __future__ import annotations

import pytest
import torch

from quire import EngineConfig
from quire.attention.reference import ReferenceAttention
from quire.layers.env import Env
from quire.models.checkpoint import DummyCheckpoint
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.parallel import Parallel
from quire.worker.worker import Worker
from tiny import CONFIG

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 64}, (4, 16)),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 16}, (16, 1)),
        # positions end where the context ends, so more tokens would need more rows
        ({"max_num_seqs": 1, "max_num_batched_tokens": 8192}, (1, 256)),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 8192, "max_model_len": 100}, (2, 100)),
    ],
)
def test_the_largest_step(settings: dict, expected: tuple[int, int]) -> None:
    spec, backend = ModelSpec.from_config(CONFIG), ReferenceAttention()
    model = build_model(
        spec, Env(DummyCheckpoint(0, CPU, torch.float32), Parallel(), backend, CPU, torch.float32)
    )
    config = EngineConfig(model="tiny", **settings).resolved(0, spec.max_model_len)
    assert Worker(config, model, backend, CPU, torch.float32, 1)._largest_step() == expected
