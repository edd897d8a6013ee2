"""Plots in every format, and the error without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quire.bench.growth import GrowthPoint
from quire.bench.growth_plot import plot_growth
from quire.bench.plots import bin_width_s, check_plot, plot_serving, plot_sweep
from quire.bench.run import Run, ServedRequest
from quire.core.steplog import StepRecord
from quire.types import ConfigError

STEPS = [
    StepRecord(i, 5.0 + i / 10, [("a", i, 1), ("b", 0, 40)], [], [], 2, i % 3, None, 9) for i in range(20)
]
RUNS = {
    "usual": Run(
        [ServedRequest(9, i / 9, [i / 9 + 0.1 * k for k in range(1, 9)]) for i in range(9)], STEPS, 5.0
    ),
    "one token": Run([ServedRequest(9, 0.0, [0.5])], STEPS[:1], 5.0),
}


@pytest.fixture(autouse=True)
def matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_load(tmp_path: Path, name: str, suffix: str, begins: bytes) -> None:
    path = tmp_path / "plots" / f"load{suffix}"
    check_plot(path)
    plot_serving(RUNS[name], "title", path)
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize("itl", [3.0, None])
def test_a_sweep(tmp_path: Path, itl: float | None) -> None:
    batches = [
        {
            "batch_size": size,
            "output_throughput": 100.0 * size**0.8,
            "share_of_limit": 0.5,
            "median_ttft_ms": 5.0 + size,
            "median_itl_ms": itl,
            "p99_itl_ms": itl,
        }
        for size in (1, 2, 8)
    ]
    path = tmp_path / "sweep.svg"
    plot_sweep(batches, "title", path)
    assert (
        "the machine's limit" in path.read_text() or path.stat().st_size > 10_000
    )  # text may be drawn as paths


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"plot must end in \.png"):
        check_plot(tmp_path / "plot.gif")
    with pytest.raises(ConfigError, match="cannot write"):
        plot_serving(RUNS["usual"], "title", Path("/dev/null/plot.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'quire-llm\[bench\]'"):
        check_plot(tmp_path / "plot.png")


def test_intervals_are_no_narrower_than_a_step() -> None:
    assert bin_width_s(60.0, [10.0] * 100) == 1.0
    assert bin_width_s(6.0, [500.0] * 100) == 0.5
    assert bin_width_s(0.2, [500.0]) == 0.2
    assert bin_width_s(6.0, []) == 0.1


def test_growth(tmp_path: Path) -> None:
    points = [
        GrowthPoint(curve, rows, context, 2e-3 * rows, 1e-3 * rows, "bandwidth", {})
        for curve, rows, context in [
            ("batch", 1, 128), ("batch", 8, 128), ("context", 1, 128), ("context", 8, 128), ("context", 8, 512),
            ("prompt", 1, 32), ("prompt", 1, 2048),
        ]
    ]  # fmt: skip
    whole, part = tmp_path / "growth.png", tmp_path / "prompts.svg"
    plot_growth(points, "title", whole)
    plot_growth([point for point in points if point.curve == "prompt"], "title", part)
    assert whole.read_bytes().startswith(b"\x89PNG") and part.read_bytes().startswith(b"<?xml")
