"""Plot the results of benchmarks/speculation.py: the gain over acceptance and over the batch, measured and predicted.

python benchmarks/speculation_plot.py benchmarks/results/h200-speculation.json docs/images/speculation.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from quire.bench.plots import GREY, LINES, check_plot, new_figure, save_figure, tick_each

Result = dict[str, Any]


def select(results: list[Result], part: str, case: str) -> list[Result]:
    """Return the results of one case of one part, ordered by batch and acceptance."""
    found = [one for one in results if (one["part"], one["case"]) == (part, case)]
    return sorted(found, key=lambda one: (one["batch"], one["p"]))


def plot(results: list[Result], path: Path) -> None:
    """Plot the gains over acceptance, over the batch, and those of the workload that copies."""
    figure = new_figure((13.5, 4.4))
    over_acceptance, over_batch, copying = figure.subplots(1, 3)
    _over_acceptance(over_acceptance, results)
    _over_batch(over_batch, results)
    _copying(copying, results)
    for axes in (over_acceptance, over_batch, copying):
        axes.axhline(1, color=GREY, linewidth=1)
        axes.set_yscale("linear")
        axes.set(ylabel="times as fast as plain decoding")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    save_figure(figure, "Gain of speculative decoding, Llama-3.1-8B shape, one H200", path)


def _over_acceptance(axes: Any, results: list[Result]) -> None:
    curves = [("small", batch, f"bfloat16, batch {batch}") for batch in (1, 8, 32)] + [
        ("fp8", 1, "FP8, batch 1")
    ]
    for color, (part, batch, label) in zip(LINES, curves):
        ours = [one for one in select(results, part, "adaptive") if one["batch"] == batch]
        axes.plot(
            [one["p"] for one in ours], [one["gain"] for one in ours], color=color, marker="o", label=label
        )
    axes.set(title="Adaptive depth over acceptance", xlabel="probability that a draft is right")
    axes.grid(True, color="#dddddd", linewidth=0.6)


def _over_batch(axes: Any, results: list[Result]) -> None:
    curves = [
        ("fixed 5", 0.8, "5 drafts, p 0.8"),
        ("fixed 3", 0.8, "3 drafts, p 0.8"),
        ("fixed 3", 0.3, "3 drafts, p 0.3"),
    ]
    for color, (case, p, label) in zip(LINES, curves):
        ours = [one for one in select(results, "small", case) if one["p"] == p]
        batches = [one["batch"] for one in ours]
        axes.plot(batches, [one["gain"] for one in ours], color=color, marker="o", label=label)
        axes.plot(batches, [one["predicted_gain"] for one in ours], color=color, linestyle=":")
    axes.plot([], [], color=GREY, linestyle=":", label="predicted from step times")
    axes.set(title="Fixed depth over the batch size, bfloat16")
    tick_each([axes], [1, 8, 32], "requests")


def _copying(axes: Any, results: list[Result]) -> None:
    for color, case, label in zip(LINES, ("fixed 5", "adaptive"), ("5 drafts", "adaptive")):
        ours = select(results, "copy", case)
        axes.plot(
            [one["batch"] for one in ours],
            [one["gain"] for one in ours],
            color=color,
            marker="o",
            label=label,
        )
    axes.set(title="ngram on answers that copy, bfloat16")
    tick_each([axes], [1, 8, 32], "requests")


def main() -> None:
    source, target = (Path(given) for given in sys.argv[1:])
    check_plot(target)
    plot(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
