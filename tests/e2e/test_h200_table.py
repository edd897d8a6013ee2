"""benchmarks/h200_table.py on a tiny shape, so that mistakes show before GPU time is spent."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.bench.cost import Machine
from quire.bench.load.workloads import uniform
from tiny import CONFIG

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {**CONFIG, "max_position_embeddings": 4096, "dtype": "bfloat16"}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("h200_table")
    monkeypatch.setattr(module, "SHAPES", {**module.SHAPES, "tiny": TINY})
    monkeypatch.setattr(module, "VOCAB", 200)
    monkeypatch.setattr(module, "measure", lambda device, dtype: Machine("a machine", 1e9, 1e10))
    small = {name: lambda vocab, count: uniform(vocab, count or 3, 40, 4) for name in module.WORKLOADS}
    monkeypatch.setattr(module, "WORKLOADS", small)
    return module


def test_rows_are_kept_and_replaced(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"

    def run(*args: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["h200_table.py", "--models", "tiny", "--out", str(out), *args])
        table.main()
        return json.loads(out.read_text())

    found = run("--workloads", "startup", "nano", "prefix")
    rows = {row["workload"]: row for row in found["rows"]}
    assert list(rows) == ["startup", "nano", "nano sampled", "prefix"]
    assert rows["nano"]["unit"] == "tok/s" and rows["prefix"]["value"] == rows["prefix"]["duration"]
    assert len(rows["nano"]["runs_s"]) == 2 and rows["nano"]["duration"] == min(rows["nano"]["runs_s"])
    assert rows["nano sampled"]["target"] == 0.95 * rows["nano"]["value"]
    assert rows["nano"]["cached_tokens"] == 0 and rows["nano"]["share_of_limit"] > 0
    assert rows["startup"]["value"] == min(one["total"] for one in rows["startup"]["starts"])
    again = run("--workloads", "nano", "--eager")["rows"]
    assert [row["workload"] for row in again] == ["startup", "nano sampled", "prefix", "nano"]
    assert len(again[-1]["runs_s"]) == 1
    assert capsys.readouterr().out.count("\ntiny ") == 5 + 4 + 4


def test_shapes_have_the_sizes_of_their_names(table: ModuleType) -> None:
    checkpoint = importlib.import_module("random_checkpoint")
    for name, millions in (("Qwen3-0.6B", 596), ("Llama-3.2-3B", 3213), ("Llama-3.1-8B", 8030)):
        sizes = [
            shape[0] * shape[1]
            for shape in checkpoint.tensor_shapes(table.SHAPES[name]).values()
            if len(shape) == 2
        ]
        assert sum(sizes) / 1e6 == pytest.approx(millions, abs=1)


def test_a_written_checkpoint_is_read_in_shards(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire import LLM, SamplingParams

    checkpoint = importlib.import_module("random_checkpoint")
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(checkpoint, "_STRETCH", 1000)
    checkpoint.write_checkpoint(tmp_path, TINY)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu", kv_cache_memory=1 << 22) as llm:
        out = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(out[0].outputs[0].token_ids) >= 1
