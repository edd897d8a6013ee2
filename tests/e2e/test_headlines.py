"""benchmarks/headlines.py with the built-in model, so that mistakes show before GPU time is spent."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def headlines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("headlines")


def test_every_group_writes_its_rows(
    headlines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(results: object) -> None:
        raise RuntimeError("no such card")

    out = tmp_path / "rows.json"
    groups = {name: headlines.GROUPS[name] for name in ("clients", "paced-llama", "real-pace")}
    monkeypatch.setattr(headlines, "GROUPS", {"broken": fails, **groups})
    command = ["headlines.py", "--demo", "--pace", "50", "--out", str(out), "--groups", "broken", *groups]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="failed: broken"):
        headlines.main()
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["1 clients, 128 in, 128 out"]["published"] == 55.7
    assert rows["chunked_prefill"]["published"] == 219 and rows["chunked_prefill"]["pace"] == 50
    gain = rows["TTFT: without to with prefix cache"]
    assert gain["value"] == pytest.approx(100 * (gain["after_ms"] / gain["before_ms"] - 1))
    assert all(row["value"] > 0 for row in rows.values() if row["unit"] == "tok/s")
    assert "no such card" in capsys.readouterr().err


def test_a_group_beyond_the_time_is_left_out(
    headlines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(headlines, "GROUPS", {"never": lambda results: pytest.fail("it ran")})
    monkeypatch.setattr(
        sys, "argv", ["h.py", "--demo", "--limit-s", "1", "--groups", "never", "--out", str(tmp_path / "x")]
    )
    headlines.main()
    assert "never: left out" in capsys.readouterr().out


def test_the_shapes_have_the_sizes_of_their_names(headlines: ModuleType) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for name, shape in headlines.SHAPES.items():
        config = AutoConfig.for_model(**{k: v for k, v in shape.items() if k != "architectures"})
        with torch.device("meta"):
            found[name] = (
                sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) // 10**6
            )
    assert found == {
        "GPT-2 124M": 124, "Qwen2.5-7B": 7615, "Llama-3.2-3B": 3212, "Qwen3-4B": 4022, "Gemma-3-1B": 999,
    }  # fmt: skip
