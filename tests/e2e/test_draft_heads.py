"""Draft heads: their drafts are those of a sequential twin in plain PyTorch, and change no output."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads import DraftsWithPauses, Recorder, eagle3_drafts, run, write_eagle, write_eagle3, write_mtp
from quire import EngineConfig
from quire.assembly.drafting import find_draft
from quire.assembly.model import served_spec
from quire.models.config.load import load_spec
from quire.models.gemma3n import Gemma3nModel
from quire.models.heads import base
from quire.types import ConfigError
from tiny import write_tiny

TAPS = {"eagle_aux_hidden_state_layer_ids": [-1, 0]}  # the tiny model has two layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "eagle3"
    write_eagle3(folder, **TAPS)
    return folder


SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "cpu_kernels": False},
    {"max_num_batched_tokens": 8, "block_size": 4, "max_num_seqs": 2},
]


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}],
    ids=["usual", "plain torch", "chunks", "quantised model", "coded cache"],
)
def test_eagle3_changes_no_output(model: Path, eagle3: Path, settings: dict[str, Any]) -> None:
    plain, _ = run(model, **settings)
    drafts = {"spec_method": "eagle3", "spec_model": str(eagle3), "spec_tokens": 3, "spec_adaptive": False}
    drafted, totals = run(model, **settings, **drafts)
    assert drafted == plain
    assert totals.draft_tokens > 60


ON_GPU: list[dict[str, Any]] = [
    {"capture_at_start": False},
    {"overlap": False, "cuda_graphs": False},
    {"max_num_batched_tokens": 8, "max_num_seqs": 2},
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("settings", ON_GPU, ids=["graphs", "eager", "chunks"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_heads_change_no_output_on_the_gpu(
    model: Path, eagle3: Path, tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    drafts: dict[str, Any] = {"spec_method": method, "spec_tokens": 3, "spec_adaptive": False}
    if method == "eagle3":
        drafts["spec_model"] = str(eagle3)
    elif method == "eagle":
        write_eagle(tmp_path / "eagle")
        drafts["spec_model"] = str(tmp_path / "eagle")
    else:
        model = write_mtp(tmp_path)
    plain, _ = run(model, device="cuda", **settings)
    drafted, totals = run(model, device="cuda", **settings, **drafts)
    assert drafted == plain
    assert totals.draft_tokens > 60


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_converted_head_changes_no_output(model: Path, eagle3: Path, form: str) -> None:
    plain, _ = run(model)
    drafts = {"spec_method": "eagle3", "spec_model": str(eagle3), "spec_tokens": 3, "spec_adaptive": False}
    drafted, totals = run(model, **drafts, spec_quantization=form)
    assert drafted == plain and totals.draft_tokens > 60


@pytest.mark.parametrize("chunk", [None, 8], ids=["whole prompt", "chunks"])
def test_eagle3_drafts_what_its_twin_does(
    model: Path, eagle3: Path, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    run(
        model, count=1, spec_method="eagle3", spec_model=str(eagle3), spec_tokens=3, spec_adaptive=False,
        max_num_batched_tokens=chunk, overlap=False, cpu_kernels=False,
    )  # fmt: skip
    head, embed = load_file(eagle3 / "model.safetensors"), load_file(model / "model.safetensors")
    for known, drafts in recorder.drafts[:6]:
        features = recorder.states(len(known) - 1)
        assert drafts == eagle3_drafts(head, embed["model.embed_tokens.weight"], known, features, len(drafts))
    assert len(recorder.drafts) >= 6


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pause", [9, 31, 80])
def test_eagle3_drafts_what_its_twin_does_after_a_pause(
    model: Path, eagle3: Path, pause: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts do not run the head, which has to know their tokens later."""
    recorder = Recorder(monkeypatch)
    run(
        model, count=1, tokens=200, depth=DraftsWithPauses(3, pause), max_model_len=256, spec_method="eagle3",
        spec_model=str(eagle3), spec_tokens=3, overlap=overlap, cpu_kernels=False,
    )  # fmt: skip
    head, embed = load_file(eagle3 / "model.safetensors"), load_file(model / "model.safetensors")
    lengths = [len(known) for known, _ in recorder.drafts]
    assert max(b - a for a, b in pairwise(lengths)) >= pause
    for known, drafts in recorder.drafts:
        features = recorder.states(len(known) - 1)
        assert drafts == eagle3_drafts(head, embed["model.embed_tokens.weight"], known, features, len(drafts))


def matrix_bytes(tensors: dict[str, torch.Tensor], prefix: str = "") -> int:
    return sum(t.nbytes for name, t in tensors.items() if t.ndim == 2 and name.startswith(prefix))


@pytest.mark.parametrize("target", [32, 48], ids=["embedding of the model", "its own embedding"])
def test_the_weights_of_a_head_are_counted(tmp_path: Path, target: int) -> None:
    head = write_eagle3(tmp_path / "head", target=target, target_hidden_size=target, **TAPS)
    spec = replace(load_spec(write_tiny(tmp_path / "model")), hidden_size=target)
    config = EngineConfig(model="demo", spec_method="eagle3", spec_model=str(tmp_path / "head"))
    (draft,) = find_draft(config, tmp_path / "model", spec)
    for ranks in (1, 2):  # each has the whole head
        assert draft.weight_bytes(torch.float32, torch.device("cpu"), True, ranks) == matrix_bytes(head)


@pytest.mark.parametrize("form", [None, "int8"])
def test_the_weights_of_the_layer_for_mtp_are_counted(tmp_path: Path, form: Any) -> None:
    model = write_mtp(tmp_path)
    spec = served_spec(EngineConfig(model=str(model), quantization=form or "auto"), load_spec(model))
    (draft,) = find_draft(EngineConfig(model=str(model), spec_method="mtp"), model, spec)
    stored = matrix_bytes(load_file(model / "model.safetensors"), "model.layers.2.")
    for ranks in (1, 2):
        counted = draft.weight_bytes(torch.float32, torch.device("cpu"), True, ranks)
        assert counted == stored // (4 if form else 1) // ranks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 16, "use_sliding_window": True}, "attends to a window of 16 tokens"),
        ({"intermediate_size": 48}, r"spec_method eagle3 cannot use .*has shape.*use a complete checkpoint"),
        ({"vocab_size": 300}, "trained for a vocabulary of 300 tokens, but the model has 260"),
        ({"target_hidden_size": 64}, "reads hidden states of 64 numbers, but the model has 32"),
        ({"eagle_aux_hidden_state_layer_ids": [5]}, r"in front of the layers \[6\], but the model has only 2"),
    ],
)  # fmt: skip
def test_a_head_for_another_model_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_eagle3(tmp_path / "head", **{**TAPS, **changes})
    with pytest.raises(ConfigError, match=message):
        run(model, spec_method="eagle3", spec_model=str(tmp_path / "head"))


def test_mtp_changes_no_output(tmp_path: Path) -> None:
    model = write_mtp(tmp_path)
    plain, _ = run(model)
    drafted, totals = run(model, spec_method="mtp", spec_tokens=3, spec_adaptive=False)
    assert drafted == plain
    assert totals.draft_tokens > 60


def test_a_model_without_the_layer_refuses_mtp(model: Path) -> None:
    with pytest.raises(ConfigError, match="spec_method mtp needs a layer for multi-token prediction"):
        run(model, spec_method="mtp")


def test_models_of_other_kinds_refuse_heads() -> None:
    class Other:
        spec = type("Spec", (), {"architecture": "GPT2LMHeadModel"})()

    with pytest.raises(ConfigError, match="GPT2LMHeadModel is another model"):
        base.decoder_of(Other(), "mtp")  # type: ignore[arg-type]
    several_streams = object.__new__(Gemma3nModel)
    several_streams.spec = Other.spec  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="one residual stream"):
        base.decoder_of(several_streams, "eagle3")
