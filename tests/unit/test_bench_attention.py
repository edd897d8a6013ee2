"""`quire bench attention` with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.bench.attention import AttentionBench, AttentionCase
from quire.bench.cost import Machine
from quire.cli.main import main
from quire.models.spec import ModelSpec
from quire.types import ConfigError
from tiny import CONFIG, write_tiny


def test_every_back_end_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_tiny(tmp_path / "tiny"), tmp_path / "attention.json"
    flags = ["--batch-sizes", "1", "3", "--contexts", "40", "--prompt-lens", "33", "--output-json", str(out)]
    assert main(["bench", "attention", str(folder), "--device", "cpu", *flags]) == 0
    figures = json.loads(out.read_text())["figures"]
    cases = [(one["kind"], one["rows"], one["length"]) for one in figures if one["backend"] == "plain loop"]
    assert cases == [("decode", 1, 40), ("decode", 3, 40), ("prefill", 1, 33)]
    assert {one["backend"] for one in figures} >= {"plain loop", "reference"}
    assert all(one["time_s"] > 0 and one["share_of_limit"] > 0 for one in figures)
    assert "1.00x" in capsys.readouterr().out  # the loop over itself


def test_prompts_leave_out_what_differs_for_decoding_only() -> None:
    bench = AttentionBench(
        ModelSpec.from_config(CONFIG), torch.device("cpu"), torch.float32, Machine("a", 1e9, 1e10)
    )
    found = {one.backend for one in bench.measure([AttentionCase(1, 20, True)])}
    assert found == {"plain loop", "reference"}


def test_latent_attention_is_refused() -> None:
    spec = ModelSpec.from_config(CONFIG)
    object.__setattr__(spec, "latent", object())
    with pytest.raises(ConfigError, match="needs keys and values of heads"):
        AttentionBench(spec, torch.device("cpu"), torch.float32, Machine("a", 1e9, 1e10))
