"""Heads of the first EAGLE: their drafts are those of a sequential twin in plain PyTorch, and change no output."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads import DraftsWithPauses, Recorder, eagle_drafts, run, write_eagle
from quire import EngineConfig
from quire.assembly.drafting import find_draft
from quire.models.config.load import load_spec
from quire.types import ConfigError
from tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=[True, False], ids=["biases", "plain"])
def head(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "eagle"
    write_eagle(folder, bias=request.param, copies=request.param)
    return folder


def settings(head: Path, **more: Any) -> dict[str, Any]:
    return {"spec_method": "eagle", "spec_model": str(head), "spec_tokens": 3, "spec_adaptive": False, **more}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "cpu_kernels": False},
    {"max_num_batched_tokens": 8, "block_size": 4, "max_num_seqs": 2},
    {"quantization": "int4"},
    {"kv_cache_dtype": "int8"},
]


@pytest.mark.parametrize(
    "more", SETTINGS, ids=["usual", "plain torch", "chunks", "quantised model", "coded cache"]
)
def test_no_output_changes(model: Path, head: Path, more: dict[str, Any]) -> None:
    plain, _ = run(model, **more)
    drafted, totals = run(model, **more, **settings(head))
    assert drafted == plain and totals.draft_tokens > 60


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_converted_head_changes_no_output(model: Path, head: Path, form: str) -> None:
    plain, _ = run(model)
    drafted, totals = run(model, **settings(head, spec_quantization=form))
    assert drafted == plain and totals.draft_tokens > 60


def check_drafts(recorder: Recorder, model: Path, head: Path, most: int | None = None) -> None:
    """Compare the recorded drafts with those of the twin."""
    tensors, target = load_file(head / "model.safetensors"), load_file(model / "model.safetensors")
    embed = target["model.embed_tokens.weight"]
    unembed = target.get("lm_head.weight", embed)
    for known, drafts in recorder.drafts[:most]:
        states = recorder.states(len(known) - 1)
        assert drafts == eagle_drafts(tensors, embed, unembed, known, states, len(drafts))
    assert len(recorder.drafts) >= 6


@pytest.mark.parametrize("chunk", [None, 8], ids=["whole prompt", "chunks"])
def test_drafts_are_those_of_the_twin(
    model: Path, head: Path, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    run(model, count=1, max_num_batched_tokens=chunk, overlap=False, cpu_kernels=False, **settings(head))
    check_drafts(recorder, model, head, most=6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pause", [9, 80])
def test_drafts_after_a_pause_are_those_of_the_twin(
    model: Path, head: Path, pause: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts do not run the head, which has to know their tokens later."""
    recorder = Recorder(monkeypatch)
    run(
        model, count=1, tokens=200, depth=DraftsWithPauses(3, pause), max_model_len=256, overlap=overlap,
        cpu_kernels=False, **settings(head),
    )  # fmt: skip
    lengths = [len(known) for known, _ in recorder.drafts]
    assert max(b - a for a, b in pairwise(lengths)) >= pause
    check_drafts(recorder, model, head)


def test_the_weights_are_counted(tmp_path: Path) -> None:
    tensors = write_eagle(tmp_path / "head", copies=False)
    spec = load_spec(write_tiny(tmp_path / "model"))
    config = EngineConfig(model="demo", spec_method="eagle", spec_model=str(tmp_path / "head"))
    (draft,) = find_draft(config, tmp_path / "model", spec)
    stored = sum(t.nbytes for t in tensors.values() if t.ndim == 2)
    assert draft.weight_bytes(torch.float32, torch.device("cpu"), True, 2) == stored


def test_the_nested_configuration_of_conversions_is_read(model: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    nested = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": json.loads(file.read_text())}
    file.write_text(json.dumps(nested))
    plain, _ = run(model)
    drafted, _ = run(model, **settings(tmp_path / "head"))
    assert drafted == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 16, "use_sliding_window": True}, "attends to a window of 16 tokens"),
        ({"vocab_size": 300}, "trained for a vocabulary of 300 tokens, but the model has 260"),
        ({"hidden": 48}, "reads hidden states of 48 numbers, but the model has 32"),
        ({"num_hidden_layers": 2}, "draft heads have one layer"),
        ({"add_para_norm": True}, "norms its inputs"),
        ({"intermediate_size": 48}, "spec_method eagle cannot use .* has shape .* use a complete checkpoint"),
    ],
)  # fmt: skip
def test_a_head_for_another_model_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_eagle(tmp_path / "head", **changes)
    with pytest.raises(Exception, match=message) as caught:
        run(model, **settings(tmp_path / "head"))
    assert isinstance(caught.value, ConfigError) or "num_hidden_layers" in str(caught.value)
