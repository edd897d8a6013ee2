"""From the name of a model to files on this machine. Nothing is read here but directory entries.

A name is a folder, a .gguf file, one of the two models that ship with Quire, or a Hugging Face id, which is
fetched into the local cache. Whatever goes wrong is a ModelError that says what to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.types import ModelError

BUILT_IN = {"demo": "base", "demo-draft": "draft"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_HUB_SKIPPED = ["original/*", "*.bin.index.json", "onnx/*"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are. `name` is what the user called it."""

    path: Path
    kind: Literal["folder", "gguf"]
    name: str


def locate_model(name: str, revision: str | None = None) -> ModelFiles:
    """The local files of model `name`, fetched first if it is a Hugging Face id."""
    if not name.strip():
        raise ModelError("the model name is empty: give a folder, a .gguf file, a Hugging Face id, or demo")
    path = Path(name).expanduser()
    if revision is not None and (name in BUILT_IN or path.exists()):
        raise ModelError(
            f"{name} is on this machine and has no revision {revision!r}: revision is for Hugging Face ids"
        )
    if name in BUILT_IN and not path.exists():
        return _folder(Path(__file__).parents[1] / "demo" / BUILT_IN[name], name)
    if path.is_dir():
        return _folder(path, name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{name} is a file but not a .gguf file: give the folder that holds the checkpoint"
            )
        return ModelFiles(path, "gguf", name)
    looks_local = name.startswith((".", "/", "~")) or path.suffix == ".gguf" or not _HUB_ID.fullmatch(name)
    if looks_local:
        raise ModelError(f"there is no folder or file {name}: check the path")
    return _folder(_fetch(name, revision, _HUB_FILES), name)


def locate_tokenizer(name: str, revision: str | None = None) -> Path:
    """The folder or file of a tokenizer given by its own name; without weights if it has to be fetched."""
    path = Path(name).expanduser()
    if name in BUILT_IN and not path.exists():
        return locate_model(name).path
    if path.exists():
        return path
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"there is no tokenizer folder or file {name}: check the path")
    return _fetch(name, revision, _HUB_FILES[1:])


def _folder(path: Path, name: str) -> ModelFiles:
    if not (path / "config.json").is_file():
        if name in BUILT_IN:
            raise ModelError(f"the model {name} is not part of this installation: install Quire again")
        ggufs = sorted(path.glob("*.gguf"))
        hint = f": name the file itself, such as {ggufs[0]}" if ggufs else ", so it is not a model folder"
        raise ModelError(f"{path} has no config.json{hint}")
    return ModelFiles(path, "folder", name)


def _fetch(name: str, revision: str | None, files: list[str]) -> Path:
    """The snapshot of a Hugging Face repository in the local cache.

    The library itself honours HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
    """
    import huggingface_hub

    options: dict[str, Any] = {"revision": revision, "allow_patterns": files, "ignore_patterns": _HUB_SKIPPED}
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except Exception as error:  # many libraries meet here, each with errors of its own
        raise _explained(name, revision, error) from error


def _explained(name: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{name} has no revision {revision}: check the branch, tag or commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"{name} is neither a local path nor a repository that you can see on Hugging Face: "
            "check the name, or set HF_TOKEN if it is private"
        )
    if isinstance(error, errors.HFValidationError):
        return ModelError(f"{name} is neither a local path nor a valid Hugging Face id: check the name")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelError(
            f"{name}{at} is not in the local cache and cannot be fetched: check the network, unset HF_HUB_OFFLINE, "
            "or give a local folder"
        )
    if isinstance(error, PermissionError):
        return ModelError(
            f"{name} cannot be stored in the local cache: set HF_HOME to a folder that you may write to"
        )
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ModelError(
        f"{name}{at} cannot be fetched from Hugging Face ({reason}): check the network, or give a local folder"
    )
