"""Steps that only compile run few layers, but at least one of each kind, and the last one."""

from __future__ import annotations

import pytest
import torch

from quire.attention.reference import ReferenceAttention
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import DummyCheckpoint
from quire.models.decoder import Model
from quire.models.heads.base import tap
from quire.models.layer_kinds import few_layers, layer_kinds
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from tiny import CONFIG

CPU = torch.device("cpu")
GEMMA = {
    **CONFIG,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}


def built(config: dict, layers: int) -> Model:
    spec = ModelSpec.from_config({**config, "num_hidden_layers": layers})
    env = Env(DummyCheckpoint(0, CPU, torch.float32), Parallel(), ReferenceAttention(), CPU, torch.float32)
    return build_model(spec, env)


@pytest.mark.parametrize(
    ("config", "kept"),
    [(CONFIG, [0, 1, 6]), (GEMMA, [0, 1, 2, 5, 6])],  # every third layer of Gemma reads all tokens
)
def test_two_layers_of_each_kind_and_the_last_one_remain(config: dict, kept: list[int]) -> None:
    model = built(config, 7)
    layers, rope_of = list(model.layers), list(model.rope_of)
    with few_layers(model):
        assert model.layers == [layers[index] for index in kept]
        assert model.rope_of == [rope_of[index] for index in kept]
        assert {layer_kinds(model.spec)[index] for index in kept} == set(layer_kinds(model.spec))
    assert model.layers == layers and model.rope_of == rope_of


def test_layers_that_a_draft_head_reads_remain() -> None:
    model = built(CONFIG, 7)
    tap(model, [1, 3, 5], "eagle3")
    layers = list(model.layers)
    with few_layers(model):
        assert list(model.layers) == [layers[index] for index in (0, 1, 3, 5, 6)]


def test_an_error_inside_restores_the_layers() -> None:
    model = built(CONFIG, 4)
    with pytest.raises(KeyError), few_layers(model):
        raise KeyError("inside")
    assert len(model.layers) == 4
