"""Rounding for calibration data: the error of outputs, whole checkpoints, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.cli.quantize import calibration_rows
from quire.models.checkpoint.calibrate import calibrated_int4
from quire.models.checkpoint.quantize import matrices_of, quantise_checkpoint
from quire.quant.export import search_symmetric
from quire.quant.gptq import InputMoments, round_by_hessian
from quire.types import ConfigError, ModelError
from tiny import write_tiny

CPU = torch.device("cpu")
ROWS = [[(7 * i + 3 * j) % 90 + 3 for i in range(40)] for j in range(6)]


def values_of(scale: torch.Tensor, codes: torch.Tensor, group: int) -> torch.Tensor:
    return ((codes.float() - 8).unflatten(-1, (-1, group)) * scale.float().unsqueeze(-1)).flatten(-2)


def test_outputs_are_closer_than_with_the_nearest_codes() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 16) @ torch.randn(16, 64) + 0.1 * torch.randn(400, 64)  # correlated inputs
    weight = torch.randn(48, 64)
    moments = InputMoments(64, CPU)
    for part in x.chunk(3):
        moments.add(part)
    scale, codes = round_by_hessian(weight, moments.hessian, 32)
    near_scale, near = search_symmetric(weight.unflatten(-1, (-1, 32)))
    want = x @ weight.t()
    calibrated, nearest = (
        (x @ values_of(*pair, 32).t() - want).norm()
        for pair in ((scale, codes), (near_scale, near.flatten(-2)))
    )
    assert calibrated < 0.6 * nearest


def test_inputs_that_are_always_zero() -> None:
    moments = InputMoments(32, CPU)
    x = torch.randn(50, 32)
    x[:, 5:9] = 0
    moments.add(x)
    weight = torch.randn(8, 32)
    scale, codes = round_by_hessian(weight, moments.hessian, 16)
    assert values_of(scale, codes, 16).isfinite().all()
    assert values_of(*round_by_hessian(weight, torch.zeros(32, 32), 16), 16).isfinite().all()


def test_a_checkpoint_is_calibrated_layer_by_layer(tmp_path: Path) -> None:
    folder, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    wanted, done = set(matrices_of(folder)), []
    found = calibrated_int4(folder, wanted, ROWS, 16, CPU, done.append)
    assert set(found) == wanted == set(done)
    quantise_checkpoint(folder, out, "int4", 16, CPU, done.append, found)
    assert len(done) == len(wanted)  # nothing is rounded twice
    stored = load_file(out / "model.safetensors")
    plain = load_file(folder / "model.safetensors")
    for name, tensors in found.items():
        for end, tensor in tensors.items():
            assert torch.equal(stored[name.removesuffix("weight") + end], tensor)
        assert tensors["weight_shape"].tolist() == list(plain[name].shape)


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    with pytest.raises(ModelError, match="holds no text"):
        calibrated_int4(folder, set(matrices_of(folder)), [[]], 16, CPU)


def test_files_of_text(tmp_path: Path) -> None:
    from quire.frontend.location import locate_model

    demo = locate_model("demo", None).path
    lines, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text("\n".join(json.dumps({"text": f"A story about {i}."}) for i in range(9)) + "\n\n")
    text.write_text("A story about a mill. " * 300)
    assert len(calibration_rows(demo, lines, 10_000)) == 9
    rows = calibration_rows(demo, text, 600)
    assert [len(row) for row in rows] == [512, 88]
    lines.write_text('{"text": "good"}\n{"other": 1}\n')
    with pytest.raises(ConfigError, match="line 2 is not a JSON object"):
        calibration_rows(demo, lines, 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        calibration_rows(demo, tmp_path / "missing.txt", 100)
