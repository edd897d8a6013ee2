"""Multi-token prediction: drafts against the layer of transformers, on checkpoints in the layout of the public ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import BASE, CASES, GLM4_MOE, GROUPS, MLA, make_reference

from heads import DraftsWithPauses, Recorder, run
from quire.types import ConfigError

Reference = tuple[Path, Any, dict[str, torch.Tensor]]
LAYERS = 2  # of the model; the one behind them predicts further tokens
KINDS = {
    "DeepseekV3": {**MLA, **GROUPS, "q_lora_rank": 20, "first_k_dense_replace": 1},
    "Glm4Moe": {**GLM4_MOE, "first_k_dense_replace": 1, "attention_bias": True},
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Write a checkpoint whose last layer is for multi-token prediction."""
    name, folder = request.param, tmp_path_factory.mktemp("mtp")
    CASES["mtp"] = name, {**KINDS[name], "num_hidden_layers": LAYERS + 1}
    model = make_reference("mtp", folder)
    del CASES["mtp"]
    file, prefix, hidden = folder / "model.safetensors", f"model.layers.{LAYERS}.", BASE["hidden_size"]
    rng = torch.Generator().manual_seed(3)
    extra = {
        name: 1 + 0.3 * torch.randn(hidden, generator=rng) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    extra["eh_proj"] = 0.25 * torch.randn(hidden, 2 * hidden, generator=rng)
    tensors = load_file(file)
    stored = {f"{prefix}{name}.weight": value for name, value in extra.items()}
    stored[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    stored[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **stored}, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    config.pop("layer_types", None)
    config.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model.model, {**extra, "head": tensors["lm_head.weight"]}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@torch.inference_mode()
def twin_drafts(reference: Reference, ids: list[int], hidden: torch.Tensor, count: int) -> list[int]:
    """Return the greedy drafts behind `ids`, whose last hidden states but one are given, without a cache."""
    _, model, extra = reference
    eps, drafts, ids = model.config.rms_norm_eps, [], list(ids)
    for _ in range(count):
        embedded = rms(model.embed_tokens(torch.tensor(ids[1:])), extra["enorm"], eps)
        x = torch.cat([embedded, rms(hidden, extra["hnorm"], eps)], 1) @ extra["eh_proj"].T
        length = len(x)
        positions = torch.arange(length).unsqueeze(0)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = model.rotary_emb(x.unsqueeze(0), positions)
        out = model.layers[LAYERS](
            x.unsqueeze(0), attention_mask=mask, position_ids=positions, position_embeddings=angles
        )
        out = (out[0] if isinstance(out, tuple) else out).view(length, -1)
        logits = rms(out[-1], extra["shared_head.norm"], eps) @ extra["head"].T
        drafts.append(int(logits.argmax()))
        ids.append(drafts[-1])
        hidden = torch.cat([hidden, out[-1:]])
    return drafts


DRAFTS: dict[str, Any] = {"spec_method": "mtp", "spec_tokens": 3, "spec_adaptive": False}


def test_drafts_are_those_of_the_layer(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    run(reference[0], count=1, overlap=False, max_num_batched_tokens=8, **DRAFTS)
    for known, drafts in recorder.drafts[:5]:
        assert drafts == twin_drafts(reference, known, recorder.states(len(known) - 1), len(drafts))
    assert len(recorder.drafts) >= 5


def test_drafts_after_a_pause_are_those_of_the_layer(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    run(reference[0], count=1, tokens=44, depth=DraftsWithPauses(3, 33), **DRAFTS)
    lengths = [len(known) for known, _ in recorder.drafts]
    assert max(b - a for a, b in pairwise(lengths)) >= 30
    for known, drafts in recorder.drafts:
        assert drafts == twin_drafts(reference, known, recorder.states(len(known) - 1), len(drafts))


def test_drafts_change_no_output(reference: Reference) -> None:
    plain, _ = run(reference[0])
    drafted, totals = run(reference[0], **DRAFTS)
    assert drafted == plain and totals.draft_tokens > 60


def test_a_checkpoint_without_the_layer_is_refused(reference: Reference, tmp_path: Path) -> None:
    tensors = load_file(reference[0] / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if f"layers.{LAYERS}." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((reference[0] / "config.json").read_bytes())
    with pytest.raises(
        ConfigError, match=rf"needs the layer {LAYERS} for multi-token prediction, but the checkpoint"
    ):
        run(tmp_path, **DRAFTS)
