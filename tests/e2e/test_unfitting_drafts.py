"""Networks that do not suit a spec_method: every refusal names the method, the reason and a way out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import GLM, random_tensors, run, write_eagle, write_eagle3, write_mtp
from quire import EngineConfig
from quire.assembly.drafting import find_draft
from quire.models.config.load import load_spec
from quire.models.heads.kinds import read_draft_folder
from quire.types import ConfigError
from tiny import write_tiny

TAPS = {"eagle_aux_hidden_state_layer_ids": [-1, 0]}  # the tiny model has two layers


def write_layer_for_mtp(folder: Path) -> None:
    """Write a file with nothing but the layer for multi-token prediction, as some servers want it."""
    whole = load_file(write_mtp(folder.with_name("whole")) / "model.safetensors")
    folder.mkdir()
    save_file({n.replace("layers.2", "layers.0"): t for n, t in whole.items() if "layers.2." in n},
              folder / "model.safetensors")  # fmt: skip
    config = {**GLM, "architectures": ["Glm4MoeForCausalLMNextN"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def write_medusa(folder: Path) -> None:
    """Write the heads of another method."""
    folder.mkdir()
    save_file(
        random_tensors({"0.0.linear.weight": (32, 32), "0.1.weight": (260, 32)}, 1),
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 1}))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "model": write_tiny,
    "model with a layer for mtp": write_mtp,
    "eagle3": lambda folder: write_eagle3(folder, **TAPS),
    "eagle3 in the name of a model": lambda folder: write_eagle3(folder, architectures=["LlamaForCausalLM"], **TAPS),
    "eagle": write_eagle,
    "eagle without copies": lambda folder: write_eagle(folder, bias=False, copies=False),
    "mtp": write_layer_for_mtp,
    "unknown": write_medusa,
}  # fmt: skip
# The method that runs each kind, which refusals by the others name.
RUNS = {"model": "draft", "eagle3": "eagle3", "eagle": "eagle", "mtp": "mtp", "unknown": "ngram"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    for number, write in enumerate(WRITERS.values()):
        (root / f"{number}").mkdir()
        write(root / f"{number}" / "network")
    return {name: root / f"{number}" / "network" for number, name in enumerate(WRITERS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def find(model: Path, method: Any, folder: Path, **more: Any) -> None:
    find_draft(
        EngineConfig(model=str(model), spec_method=method, spec_model=str(folder), **more),
        model,
        load_spec(model),
    )


@pytest.mark.parametrize("name", WRITERS)
def test_kinds_are_told_apart(folders: dict[str, Path], name: str) -> None:
    assert read_draft_folder(folders[name], "auto").kind == name.split()[0]


@pytest.mark.parametrize("method", ["draft", "eagle", "eagle3"])
@pytest.mark.parametrize("name", WRITERS)
def test_the_refusal_of_another_kind_names_its_method(
    model: Path, folders: dict[str, Path], name: str, method: str
) -> None:
    fitting = RUNS[name.split()[0]]
    if fitting == method and "mtp" not in name:
        find(model, method, folders[name])  # and no refusal
        return
    with pytest.raises(ConfigError) as caught:
        find(model, method, folders[name])
    message = str(caught.value)
    if fitting == method:  # a draft model of another vocabulary
        assert "vocabulary" in message
        return
    assert message.startswith(f"spec_method {method} needs a")
    assert str(folders[name]) in message and re.search(r": it holds \w+[.\d]", message)
    assert f"spec_method {fitting}" in message.split("; ")[-1]


@pytest.mark.parametrize("method", ["off", "ngram", "suffix", "mtp"])
def test_methods_without_a_network_of_their_own_refuse_one(
    model: Path, folders: dict[str, Path], method: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"needs a spec_method that uses it, got {method}.*--spec-method draft.*eagle"
    ):
        find(model, method, folders["eagle3"])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_any_missing_tensor_of_a_head_is_named(
    model: Path, folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    tensors = load_file(folders[kind] / "model.safetensors")
    optional = re.compile(r"bias$|embed_tokens|t2d|d2t")
    for name in filter(lambda name: not optional.search(name), tensors):
        folder = tmp_path / name
        folder.mkdir()
        save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
        (folder / "config.json").write_text((folders[kind] / "config.json").read_text())
        with pytest.raises(ConfigError) as caught:
            find(model, kind, folder)
        message = str(caught.value)
        assert f"lacks the tensor {name}: it holds " in message
        assert f"complete checkpoint for spec_method {kind}, or use spec_method ngram" in message


def test_several_missing_tensors_are_refused(model: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """Half of the tensors are gone: whatever is left, the refusal names method and way out."""
    rng = random.Random(5)
    for trial in range(40):
        kind = rng.choice(["eagle", "eagle3"])
        tensors = load_file(folders[kind] / "model.safetensors")
        kept = rng.sample(sorted(tensors), len(tensors) // 2)
        folder = tmp_path / str(trial)
        folder.mkdir()
        save_file({name: tensors[name] for name in kept}, folder / "model.safetensors")
        (folder / "config.json").write_text((folders[kind] / "config.json").read_text())
        method = rng.choice(["draft", "eagle", "eagle3"])
        with pytest.raises(ConfigError) as caught:
            find(model, method, folder)
        assert f"spec_method {method}" in str(caught.value) and "use " in str(caught.value).split("; ")[-1]


def test_a_missing_tensor_of_the_layer_for_mtp_has_a_way_out(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"spec_method mtp cannot use .*no tensor model.layers.2.eh_proj.weight.*use a complete checkpoint",
    ):
        run(folder, spec_method="mtp")


def test_pickled_heads_are_refused_with_a_way_out(
    model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    torch.save(load_file(folders["eagle"] / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "config.json").write_text((folders["eagle"] / "config.json").read_text())
    with pytest.raises(Exception, match=r"holds only pickled weights .* convert them to safetensors"):
        find(model, "eagle", folder)
