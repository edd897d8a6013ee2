"""Names of models become local files, or one sentence that says what to do. No network is used."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.frontend import location
from quire.frontend.location import ModelFiles, locate_model, locate_tokenizer
from quire.types import ModelError


def test_a_folder_and_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert locate_model(str(tmp_path)) == ModelFiles(tmp_path, "folder", str(tmp_path))
    assert locate_model(str(tmp_path / "m.gguf")).kind == "gguf"


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_built_in_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "quire"
    folder = package / "demo" / location.BUILT_IN[name]
    monkeypatch.setattr(location, "__file__", str(package / "frontend" / "location.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="reinstall Quire"):
        locate_model(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert locate_model(name) == ModelFiles(folder, "folder", name)
    assert locate_tokenizer(name) == folder


@pytest.mark.parametrize("name", ["demo", "."])
def test_a_revision_is_not_for_what_is_here(name: str) -> None:
    with pytest.raises(
        ModelError, match=f"revision 'main' cannot be chosen for the local model {re.escape(name)}"
    ):
        locate_model(name, "main")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "is empty"),
        ("./nowhere", "no folder or file ./nowhere"),
        ("/no/such/place", "check the path"),
        ("a/b/c", "check the path"),
        ("some/model.gguf", "check the path"),
        ("what is this", "check the path"),
        ("plain.txt", "not a .gguf file"),
        ("empty", "no config.json, so it is not a model folder"),
        ("ggufs", r"name the file itself, such as .*a\.gguf"),
    ],
)
def test_wrong_names(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.txt").write_text("x")
    Path("empty").mkdir()
    Path("ggufs").mkdir()
    Path("ggufs/a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=says):
        locate_model(name)


@pytest.mark.parametrize("locate", [locate_model, locate_tokenizer])
def test_a_folder_behind_one_without_permission(locate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelError, match=re.escape("/closed/model cannot be read: Permission denied")):
        locate("/closed/model")


def test_a_hub_id_is_fetched_with_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def fake(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with pytest.raises(ModelError, match=r"no config\.json"):
        locate_model("some/model")
    (tmp_path / "config.json").write_text("{}")
    assert locate_model("some/model", "v2") == ModelFiles(tmp_path, "folder", "some/model")
    assert calls[-1][0] == "some/model" and calls[-1][1]["revision"] == "v2"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(calls[-1][1]["allow_patterns"])
    assert locate_tokenizer("some/model") == tmp_path
    assert "*.safetensors" not in calls[-1][1]["allow_patterns"]


def hub_error(kind: type[Exception]) -> Exception:
    """The library's HTTP errors want a response; only their type matters here."""
    error = kind.__new__(kind)
    Exception.__init__(error, "details\nfrom the library")
    return error


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (errors.GatedRepoError, "gated: accept its terms"),
        (errors.RepositoryNotFoundError, "neither a local path nor a repository"),
        (errors.RevisionNotFoundError, "has no revision v2"),
        (errors.LocalEntryNotFoundError, "not in the local cache"),
        (errors.HFValidationError, "nor a valid Hugging Face id"),
        (PermissionError, "HF_HOME"),
        (ConnectionError, "check the network"),
    ],
)
def test_what_goes_wrong_while_fetching(
    kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, **options: Any) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=says) as caught:
        locate_model("some/model", "v2")
    assert "\n" not in str(caught.value)


def test_offline_without_a_cache_is_a_clean_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import partial

    original = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        partial(original, local_files_only=True, cache_dir=str(tmp_path)),
    )
    with pytest.raises(ModelError, match="not in the local cache"):
        locate_model("some/model")


def test_the_text_side_imports_neither_torch_nor_the_hub() -> None:
    modules = [
        "location",
        "tokenizer.tokenizer",
        "tokenizer.detokenizer",
        "templates.chat",
        "processor",
        "output",
    ]
    code = "; ".join(f"import quire.frontend.{m}" for m in modules)
    code += "; import sys; print([m for m in ('torch', 'huggingface_hub', 'transformers', 'gguf') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
