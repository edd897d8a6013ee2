"""What a folder holds that is given as `spec_model`: a whole model, or one of the kinds of draft heads.

Public heads often name the architecture of a whole model in their `config.json`, so the tensors decide, and the
configuration only where they could be those of several kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire.files.reading import read_json
from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.types import ConfigError

NetworkKind = Literal["model", "eagle3", "eagle", "mtp", "unknown"]

NOUNS: dict[NetworkKind, str] = {
    "model": "a whole model",
    "eagle3": "an EAGLE-3 head",
    "eagle": "an EAGLE head",
    "mtp": "a layer for multi-token prediction",
    "unknown": "neither a model nor a draft head that Quire knows",
}
_WAYS_OUT: dict[NetworkKind, str] = {
    "model": "use spec_method draft, or give a head for {method}",
    "eagle3": "use spec_method eagle3",
    "eagle": "use spec_method eagle",
    "mtp": "use spec_method mtp without spec_model, and a checkpoint of the model that contains this layer",
    "unknown": "use another spec_model, or spec_method ngram",
}
_WANTED: dict[str, NetworkKind] = {"draft": "model", "eagle3": "eagle3", "eagle": "eagle"}  # by spec_method
_ROOT = re.compile(r"^(model\.|language_model\.)*")
_LAYER = r"(midlayer|layers\.0)\."
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")  # fmt: skip
_NEEDED: dict[NetworkKind, tuple[str, ...]] = {
    "eagle": ("fc", *(_LAYER + name for name in _PROJECTIONS)),
    "eagle3": (
        "fc", *(_LAYER + name for name in (*_PROJECTIONS, "input_layernorm", "hidden_norm")), "norm", "lm_head"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """The contents of a folder that is given as `spec_model`."""

    path: Path
    architectures: tuple[str, ...] = ()  # in lower case, with the model_type
    shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # by name of the tensor, without prefix

    @property
    def kind(self) -> NetworkKind:
        """Return what the folder holds. Without tensors, the configuration decides."""
        named = self._named_kind()
        if not self.shapes:
            return named
        if self._has(r".*\b(eh_proj|enorm|hnorm)\b"):
            whole = self._has(r"layers\.0\.input_layernorm") and not self._has(r"layers\.0\.(enorm|eh_proj)")
            return "model" if whole else "mtp"
        if self._has(r"d2t$|midlayer\.|.*\bhidden_norm\b"):
            return "eagle3"
        normed = self._has(r"layers\.0\.(input_layernorm|post_feedforward_layernorm)")
        if self._has(r"layers\.0\.self_attn") and not normed and not self._has(r"layers\.1\."):
            fc = self.shapes.get("fc.weight", ())
            return "eagle3" if len(fc) == 2 and fc[1] > 2 * fc[0] else "eagle"
        if named in ("eagle3", "eagle"):
            return named
        return "model" if self._has(r"(.*\.)?(layers|h|blocks?)\.\d+\.") else "unknown"

    def _named_kind(self) -> NetworkKind:
        """Return the kind that config.json names."""
        names = " ".join(self.architectures)
        if "eagle3" in names:
            return "eagle3"
        if "eagle" in names:
            return "eagle"
        return "mtp" if re.search(r"nextn|mtp", names) else "model"

    def _has(self, pattern: str) -> bool:
        return any(re.match(pattern, name) for name in self.shapes)

    def summary(self) -> str:
        """Return what the folder looks like, for messages."""
        if not self.shapes:
            return f"its config.json names {', '.join(self.architectures) or 'no architecture'}"
        names = sorted(self.shapes, key=lambda name: (not name.startswith(("fc", "d2t", "midlayer")), name))
        more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
        return f"it holds {', '.join(names[:3])}{more}"

    def missing(self) -> str | None:
        """Return the name of a tensor that a head of this kind needs and the folder lacks."""
        for name in _NEEDED.get(self.kind, ()) if self.shapes else ():
            if not self._has(rf"{name}\.(?!bias)"):
                return name.replace(_LAYER, "midlayer." if self._has("midlayer") else "layers.0.") + ".weight"
        return None


def read_draft_folder(path: Path, load_format: str) -> DraftFolder:
    """Return the contents of `path`. With `load_format` dummy only config.json is read.

    Raises:
        ModelError: if there are no weights, or only pickled or damaged ones.
    """
    if path.suffix == ".gguf":  # only whole models are distributed so
        return DraftFolder(path)
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    found = [
        *(config.get("architectures") or ()),
        config.get("model_type") or "",
        config.get("speculators_model_type") or "",
    ]
    names = tuple(name.lower() for name in found if isinstance(name, str) and name)
    if load_format == "dummy":
        return DraftFolder(path, names)
    weights = SafetensorsCheckpoint(path, tied=False)
    try:
        shapes = {
            _ROOT.sub("", name): stored.shape for name in weights.where if (stored := weights.stored(name))
        }
    finally:
        weights.close()
    return DraftFolder(path, names, shapes)


def check_kind(method: str, folder: DraftFolder) -> None:
    """Raise ConfigError unless `folder` holds what the spec_method `method` runs, with all of its tensors."""
    kind, wanted = folder.kind, _WANTED[method]
    if kind != wanted:
        raise ConfigError(
            f"spec_method {method} needs {NOUNS[wanted]}, but spec_model {folder.path} is {NOUNS[kind]}: "
            f"{folder.summary()}; {_WAYS_OUT[kind].format(method=method)}"
        )
    if missing := folder.missing():
        raise ConfigError(
            f"{NOUNS[kind].removeprefix('an ')} {folder.path} lacks the tensor {missing}: {folder.summary()}; get the "
            f"complete checkpoint for spec_method {method}, or use spec_method ngram"
        )
