"""The plot of `quire bench compare`: the figures of every variant, one panel per unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench.comparison import ComparedFigure, Comparison
from quire.bench.plots import GREY, LINES, new_figure, save_figure


def plot_comparison(comparison: Comparison, found: Sequence[ComparedFigure], title: str, path: Path) -> None:
    """Plot one group of bars for each load: the base in grey, and the variants with their gains."""
    units = list(dict.fromkeys(one.unit for one in found))
    base, *names = comparison.variants
    figure = new_figure((max(6.5, 1.2 * len(found)) * len(units) / 1.2, 4.6))
    for axes, unit in zip(figure.subplots(1, len(units), squeeze=False)[0], units):
        ours = [one for one in found if one.unit == unit]
        loads = list(dict.fromkeys(one.load for one in ours))
        shown = [name for name in names if any(one.variant == name for one in ours)]
        width = 0.8 / (1 + len(shown))
        for at, load in enumerate(loads):
            group = [one for one in ours if one.load == load]
            first = at - 0.4 + width / 2
            axes.bar(first, group[0].base, width, color=GREY, label=base if at == 0 else None)
            for one in group:
                place = shown.index(one.variant)
                axes.bar(
                    first + (place + 1) * width, one.value, width, color=LINES[place % len(LINES)],
                    alpha=1 - 0.5 * (place // len(LINES)), label=one.variant if at == 0 else None,
                )  # fmt: skip
                axes.annotate(
                    f"{one.gain:.2f}x", (first + (place + 1) * width, one.value), (0, 3), textcoords="offset points",
                    ha="center", fontsize=7,
                )  # fmt: skip
        axes.set_xticks(range(len(loads)), loads)
        axes.set(ylabel=unit)
        axes.margins(y=0.15)
        axes.legend(fontsize=7)
    save_figure(figure, title, path)
