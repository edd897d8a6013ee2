"""The plot of `quire bench growth`: one panel per curve, measured and least time on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench.growth import GrowthPoint
from quire.bench.plots import GREY, LINES, new_figure, save_figure, tick_each

_TITLES = {
    "batch": ("Decode step over the batch size", "rows"),
    "context": ("Decode step over the context", "tokens before the step"),
    "prompt": ("Time to first token over the prompt", "prompt tokens"),
}


def plot_growth(points: Sequence[GrowthPoint], title: str, path: Path) -> None:
    """Plot the points of each curve, their share of the limit, and the limit."""
    curves = [name for name in _TITLES if any(point.curve == name for point in points)]
    figure = new_figure((5.5 * len(curves), 4.4))
    for axes, name in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves):
        ours = [point for point in points if point.curve == name]
        places: set[int] = set()
        groups = [ours] if name == "batch" else _by_batch(ours)
        for color, group in zip(LINES, groups):
            at = [point.batch_size if name == "batch" else point.context for point in group]
            places.update(at)
            axes.plot(at, [1e3 * point.floor_s for point in group], color=GREY, linestyle="--")
            label = "measured" if len(groups) == 1 else _rows(group[0].batch_size)
            axes.plot(at, [1e3 * point.time_s for point in group], color=color, marker="o", label=label)
            for x, point in zip(at, group):
                axes.annotate(
                    f"{100 * point.share_of_limit:.0f} %",
                    (x, 1e3 * point.time_s),
                    (0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
        axes.plot([], [], color=GREY, linestyle="--", label="the machine's limit")
        heading, label = _TITLES[name]
        axes.set(title=heading, ylabel="ms")
        axes.margins(y=0.12)  # room for the figures above the points
        tick_each([axes], sorted(places), label)
    save_figure(figure, title, path)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _by_batch(points: Sequence[GrowthPoint]) -> list[list[GrowthPoint]]:
    sizes = dict.fromkeys(point.batch_size for point in points)
    return [[point for point in points if point.batch_size == size] for size in sizes]
