"""The description of a model's files: folders and GGUF files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest

from quire.frontend.location import ModelFiles, locate_model
from quire.frontend.model_card import read_model_card
from quire.types import ModelError


def test_the_demo_model() -> None:
    card = read_model_card(locate_model("demo"))
    assert (card.format, card.architecture, card.quantization) == ("safetensors", "qwen3", "BF16")
    assert card.facts["qwen3.block_count"] == 7 and card.facts["qwen3.embedding_length"] == 384
    assert card.facts["qwen3.attention.head_count_kv"] == 2 and card.facts["qwen3.rope.freq_base"] == 10000.0


def test_a_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": True,
        "quantization_config": {"quant_method": "awq"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"w" * 100)
    os.utime(tmp_path / "model.safetensors", (1e9, 1e9))
    files = ModelFiles(tmp_path, "folder", "m")
    card = read_model_card(files)
    assert card.size_bytes == 100 and card.modified_s > 1e9 and card.quantization == "AWQ"
    assert card.facts == {"general.architecture": "gpt2", "gpt2.block_count": 12}
    assert read_model_card(files) == card
    os.utime(tmp_path / "model.safetensors", (2e9, 2e9))
    newer = read_model_card(files)
    assert newer.digest != card.digest and len(card.digest) == 64 and newer.modified_s == 2e9


@pytest.mark.parametrize(
    ("number", "name"),
    [(15, "Q4_K_M"), (0, "F32"), (1, "F16"), (32, "BF16"), (9999, "unknown"), (None, "unknown")],
)
def test_a_gguf_file(tmp_path: Path, number: int | None, name: str) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_chat_template("{{ messages }}")
    if number is not None:
        writer.add_file_type(number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    card = read_model_card(ModelFiles(path, "gguf", "m.gguf"))
    assert (card.format, card.architecture, card.quantization) == ("gguf", "llama", name)
    assert card.size_bytes == path.stat().st_size
    assert card.facts["llama.block_count"] == 3
    assert not any("tokens" in key or "template" in key for key in card.facts)


def test_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_model_card(ModelFiles(tmp_path, "folder", "m"))
