"""Models in the local cache of Hugging Face and the built-in ones: name, size, format, and their deletion."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.frontend.location import BUILT_IN, locate_model
from quire.types import ModelError

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_FORMATS = {
    ".safetensors": "safetensors",
    ".gguf": "GGUF",
    ".bin": "PyTorch (not supported)",
    ".pt": "PyTorch (not supported)",
}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. `used` is when its files were last read, or None for a built-in model."""

    name: str
    format: str
    size_bytes: int
    used: datetime | None
    path: Path

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `quire models --json`."""
        used = None if self.used is None else self.used.isoformat(timespec="seconds")
        return {
            "name": self.name, "format": self.format, "size_bytes": self.size_bytes, "used": used, "path": str(self.path)
        }  # fmt: skip


def stored_models() -> list[StoredModel]:
    """Return the built-in models and those in the cache, ordered by name."""
    cache = _scan()
    found = []
    for repo in cache.repos if cache else ():
        if repo.repo_type != "model":
            continue
        files = [file for revision in repo.revisions for file in revision.files]
        used = datetime.fromtimestamp(repo.last_accessed)
        format = _format_of({file.file_path.suffix for file in files})
        found.append(StoredModel(repo.repo_id, format, repo.size_on_disk, used, repo.repo_path))
    return [_built_in(name) for name in BUILT_IN] + sorted(found, key=lambda model: model.name.lower())


def delete_models(names: list[str]) -> int:
    """Delete models from the cache, with all their revisions.

    Returns:
        Bytes that became free.

    Raises:
        ModelError: if the cache has no such model, or a file cannot be deleted.
    """
    cache = _scan()
    repos = {repo.repo_id: repo for repo in (cache.repos if cache else ()) if repo.repo_type == "model"}
    wanted = [revision.commit_hash for name in names for revision in repos[name].revisions]
    freed = sum(repos[name].size_on_disk for name in names)
    try:
        if cache is not None:
            cache.delete_revisions(*wanted).execute()
    except OSError as error:
        raise ModelError(f"{', '.join(names)} cannot be deleted: {error.strerror}") from None
    return freed


def _built_in(name: str) -> StoredModel:
    path = locate_model(name).path
    size = sum(file.stat().st_size for file in path.iterdir())
    return StoredModel(name, "safetensors, built in", size, None, path)


def _format_of(suffixes: set[str]) -> str:
    for suffix, format in _FORMATS.items():
        if suffix in suffixes:
            return format
    return "no weights"


def _scan() -> HFCacheInfo | None:
    """Return the content of the cache, or None if there is none yet."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except (CacheNotFound, ValueError):  # no folder, or a file in its place
        return None


def offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids downloads."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
