"""Find the files of a model by its name. Only directory entries are read here.

A name is a folder, a .gguf file, one of the two built-in models, or a Hugging Face id, which is fetched into the local
cache. Every failure is a ModelError that says what to do.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.files.reading import check_reachable
from quire.types import ModelError

BUILT_IN = {"demo": "base", "demo-draft": "draft"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_MAX_NAME = 256  # longest name of a folder on common file systems
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_HUB_SKIPPED = ["original/*", "*.bin.index.json", "onnx/*"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The location of a model's files. `name` is the name that the user gave."""

    path: Path
    kind: Literal["folder", "gguf"]
    name: str


def names_a_model(text: str) -> bool:
    """Return whether a word of a command line is a model rather than a prompt.

    That is `demo` or `demo-draft`, a .gguf file, a folder with a `config.json`, a word that begins like a path, or an
    id with an owner, such as Qwen/Qwen3-0.6B. Only directory entries are read.
    """
    if text in BUILT_IN:
        return True
    if any(c.isspace() for c in text):
        return False
    is_id = "/" in text and _HUB_ID.fullmatch(text) is not None
    return is_id or names_a_path(text)


def names_a_path(text: str) -> bool:
    """Return whether a word is a path: it begins or ends like one, or names a folder with a `config.json`."""
    if text.startswith(("./", "../", "/", "~/")) or text.endswith(".gguf"):
        return True
    return len(text) < _MAX_NAME and os.path.isfile(os.path.join(text, "config.json"))


def locate_model(name: str, revision: str | None = None) -> ModelFiles:
    """Return the local files of a model, fetching them first if `name` is a Hugging Face id.

    Args:
        name: a folder, a .gguf file, `demo`, `demo-draft`, or a Hugging Face id.
        revision: branch, tag or commit, for Hugging Face ids only.

    Raises:
        ModelError: if there is no such model, or it cannot be fetched.
    """
    if not name.strip():
        raise ModelError("the model name is empty: give a folder, a .gguf file, a Hugging Face id, or demo")
    path = _path_of(name)
    if revision is not None and (name in BUILT_IN or path.exists()):
        raise ModelError(
            f"revision {revision!r} cannot be chosen for the local model {name}: revision is for Hugging Face ids"
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
    """Return the folder or file of a tokenizer. For a Hugging Face id, fetch everything but the weights.

    Args:
        name: a folder, a tokenizer file, `demo`, `demo-draft`, or a Hugging Face id.
        revision: branch, tag or commit, for Hugging Face ids.

    Raises:
        ModelError: if there is no such tokenizer, or it cannot be fetched.
    """
    path = _path_of(name)
    if name in BUILT_IN and not path.exists():
        return locate_model(name).path
    if path.exists():
        return path
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"there is no tokenizer folder or file {name}: check the path")
    return _fetch(name, revision, _HUB_FILES[1:])


def fetch_model(name: str, revision: str | None = None, progress: type[Any] | None = None) -> Path:
    """Fetch the missing files of a Hugging Face repository into the local cache; return its folder there.

    Args:
        name: a Hugging Face id.
        revision: branch, tag or commit.
        progress: a class like `tqdm.tqdm` whose bars are told about the bytes; an exception in it ends the fetch.

    Raises:
        ModelError: if it cannot be fetched.
    """
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"{name[:128]!r} is not a Hugging Face id, such as Qwen/Qwen3-0.6B: check the name")
    return _fetch(name, revision, _HUB_FILES, progress)


def _path_of(name: str) -> Path:
    """Return the path that a name would have, or raise ModelError if the system refuses to look there."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # a home folder that is not known
        raise ModelError(f"{name} cannot be read: {error}".rstrip(".")) from None
    check_reachable(path)
    return path


def _folder(path: Path, name: str) -> ModelFiles:
    check_reachable(path / "config.json")
    if not (path / "config.json").is_file():
        if name in BUILT_IN:
            raise ModelError(f"the model {name} is missing from this installation: reinstall Quire")
        ggufs = sorted(path.glob("*.gguf"))
        hint = f": name the file itself, such as {ggufs[0]}" if ggufs else ", so it is not a model folder"
        raise ModelError(f"{path} has no config.json{hint}")
    return ModelFiles(path, "folder", name)


def _fetch(name: str, revision: str | None, files: list[str], progress: type[Any] | None = None) -> Path:
    """Return the snapshot of a Hugging Face repository in the local cache, fetching missing files.

    The library itself honours HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
    """
    import huggingface_hub

    options: dict[str, Any] = {"revision": revision, "allow_patterns": files, "ignore_patterns": _HUB_SKIPPED}
    if progress is not None:
        options["tqdm_class"] = progress
    try:
        return Path(huggingface_hub.snapshot_download(name, **options))
    except Exception as error:  # each library below has its own exception classes
        raise _fetch_error(name, revision, error) from error


def _fetch_error(name: str, revision: str | None, error: Exception) -> ModelError:
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
