"""The description of a model's files for people: size, age, format, and the numbers of its configuration.

Nothing here decides how the model runs (models/config/ does).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.files.gguf_header import read_gguf_metadata
from quire.files.reading import read_json
from quire.frontend.location import ModelFiles

_WEIGHTS = ".safetensors"
# Keys of a GGUF header, with the keys of `config.json` that mean the same.
_GGUF_KEYS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "rope.freq_base": ("rope_theta",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "vocab_size": ("vocab_size",),
}
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The description of a model's files.

    Attributes:
        format: `safetensors` or `gguf`.
        size_bytes: size of the files.
        modified_s: time of the newest file, in seconds since 1970.
        digest: SHA-256 of the names, sizes and times of the files, which are not read for it.
        architecture: its name in the configuration, such as `qwen3`.
        quantization: storage format of the weights, such as `BF16` or `Q4_K_M`.
        facts: the numbers and words of the configuration, by their names in GGUF headers.
    """

    format: str
    size_bytes: int
    modified_s: float
    digest: str
    architecture: str
    quantization: str
    facts: dict[str, Any]


def read_model_card(files: ModelFiles) -> ModelCard:
    """Describe a model's files.

    Raises:
        ModelError: if the configuration cannot be read.
    """
    is_gguf = files.kind == "gguf"
    parts = [files.path] if is_gguf else sorted(p for p in files.path.iterdir() if p.is_file())
    status = {path.name: path.stat() for path in parts}
    identity = "\n".join(f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in status.items())
    facts, quantization = _gguf_facts(files.path) if is_gguf else _folder_facts(files.path)
    sizes = {name: s.st_size for name, s in status.items()}
    return ModelCard(
        format="gguf" if is_gguf else "safetensors",
        size_bytes=sum(size for name, size in sizes.items() if is_gguf or name.endswith(_WEIGHTS)),
        modified_s=max(s.st_mtime for s in status.values()),
        digest=hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest(),
        architecture=str(facts.get("general.architecture", "")),
        quantization=quantization,
        facts=facts,
    )


def _gguf_facts(path: Path) -> tuple[dict[str, Any], str]:
    """Return the header of a GGUF file without its lists and templates, and the storage format of the weights."""
    meta = read_gguf_metadata(path)
    facts = {
        name: value
        for name, value in meta.items()
        if not isinstance(value, list) and "chat_template" not in name
    }
    return facts, _file_type(meta.get("general.file_type"))


def _file_type(number: Any) -> str:
    from gguf import LlamaFileType  # imports numpy, which a server of other files does not need

    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "unknown"


def _folder_facts(path: Path) -> tuple[dict[str, Any], str]:
    """Return the configuration of a model folder in the words of GGUF, and the storage format of the weights."""
    config = read_json(path / "config.json")
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    architecture = str(config.get("model_type", ""))
    facts: dict[str, Any] = {"general.architecture": architecture}
    for name, keys in _GGUF_KEYS.items():
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            facts[f"{architecture}.{name}"] = value
    return facts, _stored_format(config)


def _stored_format(config: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict) and quantized.get("quant_method"):
        return str(quantized["quant_method"]).upper()
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "")
    return _DTYPES.get(dtype, "unknown")
