"""Small real models, if the shared data folder exists: expected tokens and activations."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from whole import greedy, load_model, logits_of, whole_batch

from quire.models.config.load import load_spec

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "models"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared test data (../shared/data) is absent")
torch.set_num_threads(1)
STORIES = DATA / "stories260K"
SORT = DATA / "gpt-nano-sort-85K"


@pytest.mark.parametrize("file", ["", "stories260K-F32.gguf"])
def test_stories_greedy_is_what_llama2_c_wrote(file: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    tokens = greedy(load_model(STORIES / file), [1], 200)
    assert tokenizer.decode(tokens).strip() == (STORIES / "greedy_200.txt").read_text().strip()


def test_stories_gguf_f16() -> None:
    prompt = [1, 403, 407, 261, 378]
    whole = logits_of(load_model(STORIES), [prompt])[0]
    half = logits_of(load_model(STORIES / "stories260K-F16.gguf"), [prompt])[0]
    assert (whole - half).abs().max() < 0.02
    assert load_spec(STORIES / "stories260K-F16.gguf").dtype == "float16"


def partials() -> dict[str, torch.Tensor]:
    def array(entry: dict[str, Any]) -> torch.Tensor:
        values = np.frombuffer(base64.b64decode(entry["data"]), dtype=np.float32)
        return torch.from_numpy(values.reshape(entry["shape"]).copy())

    found = json.loads((SORT / "gpt-nano-sort-t0-partials.json").read_text())
    return {name: array(entry) for name, entry in found.items() if name != "config"}


@torch.inference_mode()
def test_sort_activations() -> None:
    """Compare every recorded activation that this implementation also computes."""
    expected = partials()
    rows = expected["idx"].int().tolist()
    model: Any = load_model(SORT)
    batch = whole_batch(rows)
    got: dict[str, torch.Tensor] = {
        "tok_emb": model.tokens(batch.input_ids),
        "x": model.tokens(batch.input_ids) + model.positions(batch.positions),
    }
    first = model.layers[0]
    got["ln1"], stream = first.input_norm(got["x"], None)
    got["qkv"] = first.qkv(got["ln1"])
    q, k, v = (part.unflatten(-1, (3, 16)) for part in got["qkv"].chunk(3, -1))
    got["y"] = first.attention(q, k, v, batch)
    got["yProj"] = first.o(got["y"])
    got["ln2"], got["attnResid"] = first.post_norm(got["yProj"], stream)
    got["fc"] = first.mlp.expand(got["ln2"])
    got["gelu"] = first.mlp.activation(got["fc"])
    got["mlp"] = first.mlp(got["ln2"])
    x, residual = got["x"], None
    for i, layer in enumerate(model.layers):
        x, residual = layer(x, residual, batch)
        got[f"block{i}"] = x + residual
    got["ln_f"] = model(batch)
    got["lm_head"] = model.logits(got["ln_f"])
    got["probs"] = got["lm_head"].softmax(-1)
    for name, value in got.items():
        assert (value.view_as(expected[name]) - expected[name]).abs().max() < 3e-6 * max(
            1, expected[name].abs().max()
        ), name


def test_sort_sorts() -> None:
    model = load_model(SORT)
    for letters in ([0, 2, 1, 1, 0, 2], [2, 2, 2, 1, 0, 0], [1, 0, 1, 0, 1, 0]):
        tokens = list(letters)
        for _ in letters:
            tokens.append(int(logits_of(model, [tokens])[0][-1].argmax()))
        assert tokens[6:] == sorted(letters)
