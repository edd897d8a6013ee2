"""`quire ladder` on a tiny model: every rung is climbed, adds its settings, and keeps the tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import quire.bench.ladder.climb as climb_module
import quire.bench.ladder.rungs as rungs_module
from quire.bench.cost import Machine
from quire.bench.ladder.baseline import Baseline, MissingBaseline, transformers_baseline
from quire.bench.ladder.climb import Ladder, RungResult, SkippedRung, ratio
from quire.bench.ladder.likeness import kl
from quire.bench.ladder.report import climbed, ladder_page, plot_ladder
from quire.bench.ladder.rungs import PACKAGE, RUNGS, LadderScale, settings_of
from quire.cli.main import main
from quire.config import EngineConfig
from tiny import write_tiny

BASELINE = Baseline("transformers", "9", 48, 48, 100.0, 20.0, 9.5, 12.0, 500.0)
SCALE = LadderScale("tiny", max_model_len=2048, vocab_size=100, is_full=False, on_gpu=True, gpus=2)


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> list[RungResult | SkippedRung]:
    folder = write_tiny(tmp_path_factory.mktemp("model"))
    base = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=64)
    return list(Ladder(base, Machine("a machine", 1e9, 1e10), is_full=False, on_gpu=False, repeats=1).climb())


def test_every_rung_is_measured_against_the_one_below(rungs: list[RungResult | SkippedRung]) -> None:
    assert [one.name for one in rungs] == [rung.name for rung in RUNGS]
    measured = [one for one in rungs if isinstance(one, RungResult)]
    assert measured[0].before is None and measured[0].gain is None
    for one in measured[1:]:
        assert one.before is not None and one.after["output_throughput"] and one.gain and one.gain > 0
    assert climbed(rungs) == measured[1:]


def test_a_rung_that_the_model_refuses_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "model")
    refused = replace(RUNGS[1], settings=lambda scale: {"kv_layout": "contiguous", "max_model_len": 10**6})
    monkeypatch.setattr(climb_module, "RUNGS", (RUNGS[0], refused, RUNGS[2]))
    monkeypatch.setattr(rungs_module, "RUNGS", (RUNGS[0], refused))
    base = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=64)
    climb = Ladder(base, Machine("a machine", 1e9, 1e10), is_full=False, on_gpu=False, repeats=1).climb()
    assert isinstance(next(climb), RungResult)
    skipped = next(climb)
    assert isinstance(skipped, SkippedRung) and "max_model_len 1000000" in skipped.reason
    climb.close()


def test_no_rung_changes_the_tokens_in_float32(rungs: list[RungResult | SkippedRung]) -> None:
    measured = {one.name: one for one in rungs if isinstance(one, RungResult)}
    rounded = measured.pop("quantised weights"), measured.pop("speculation")
    for one in measured.values():
        assert one.likeness.equal_tokens == 1.0, one.name
        assert one.likeness.divergence < 1e-6, one.name
    # Other weights give other tokens; drafts on top of them change nothing.
    assert rounded[0].likeness.divergence > 0 and rounded[0].likeness == rounded[1].likeness


def test_a_batch_uses_more_of_the_cache_than_one_request(rungs: list[RungResult | SkippedRung]) -> None:
    used = {one.name: one.kv_bytes for one in rungs if isinstance(one, RungResult)}
    assert used["continuous batching"] > used["KV cache"] > 0


def test_transformers_is_the_baseline_if_it_knows_the_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = write_tiny(tmp_path / "model")
    found = transformers_baseline(EngineConfig(model=str(folder), device="cpu", dtype="float32"), SCALE)
    assert isinstance(found, Baseline)
    assert (
        found.batch_throughput > 0 and found.output_throughput > 0 and found.p99_itl_ms >= found.median_itl_ms
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": "steep"}))
    broken = transformers_baseline(EngineConfig(model=str(folder), device="cpu", dtype="float32"), SCALE)
    assert isinstance(broken, MissingBaseline) and broken.reason


def test_settings_accumulate() -> None:
    for index in range(1, len(RUNGS)):
        below, here = settings_of(index - 1, SCALE), settings_of(index, SCALE)
        assert set(below) <= set(here), "a rung never forgets a setting"
        assert below != here, "and each changes one at least"
        EngineConfig(**here)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_files_of_a_rung_exist(rung: climb_module.Rung) -> None:
    assert all((PACKAGE / name).is_file() for name in rung.files)
    assert all(count > 10 for count in rung.line_counts().values())


def test_divergence() -> None:
    half = {1: math.log(0.5), 2: math.log(0.5)}
    skewed = {1: math.log(0.25), 2: math.log(0.75)}
    assert kl(half, half) == pytest.approx(0, abs=1e-9)
    assert kl(half, skewed) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    # What only one of them names counts as the rest.
    assert kl({1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.5), 3: math.log(0.4)}) == pytest.approx(0)
    assert ratio(2.0, 3.0, more_is_better=True) == 1.5 and ratio(2.0, 4.0, more_is_better=False) == 0.5


def test_results(rungs: list[RungResult | SkippedRung], tmp_path: Path) -> None:
    skipped = SkippedRung("wings", "Fly.", "needs <feathers>")
    ladder_page([*rungs, skipped], "a model", "a machine", tmp_path / "ladder.html", BASELINE)
    page = (tmp_path / "ladder.html").read_text()
    assert "transformers 9, 48 tokens in, 48 out: 100.0 tokens/s for one request" in page
    assert "needs &lt;feathers&gt;" in page and "http" not in page.replace("html", "")
    assert all(f"<h2>{rung.name}" in page for rung in RUNGS)
    pytest.importorskip("matplotlib")
    plot_ladder([*rungs, skipped], "title", tmp_path / "ladder.svg")
    assert (tmp_path / "ladder.svg").read_text().startswith("<?xml")


def test_the_command(
    rungs: list[RungResult | SkippedRung],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(climb_module.Ladder, "climb", lambda self: iter(rungs))
    out = tmp_path / "ladder.json"
    assert main(["ladder", "demo", "--output-json", str(out), "--report", str(tmp_path / "l.html")]) == 0
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["rungs"]] == [rung.name for rung in RUNGS]
    assert found["baselines"][0]["name"] == "transformers"
    printed = capsys.readouterr().out
    assert all(rung.name in printed for rung in RUNGS)
    assert main(["ladder", "demo", "--report", "page.txt"]) == 2
    assert "report must end in .html, got 'page.txt'" in capsys.readouterr().err


def test_the_notebook_plots_the_results(
    rungs: list[RungResult | SkippedRung],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    (tmp_path / "ladder.json").write_text(json.dumps({"rungs": [one.as_dict() for one in rungs]}))
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((Path(__file__).resolve().parents[2] / "examples" / "ladder.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "the notebook is kept without outputs"
            exec("".join(cell["source"]), names)
    measured = [one for one in rungs if isinstance(one, RungResult)]
    assert f"{len(measured)} rungs were measured" in capsys.readouterr().out
    assert (tmp_path / "ladder.png").stat().st_size > 5000
