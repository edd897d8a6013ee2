"""The plot of `quire bench memory`: used and wasted bytes by batch size, one panel per layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench.kv_use import LAYOUTS, KVUse
from quire.bench.plots import GREY, LINES, new_figure, save_figure


def plot_kv_use(found: Sequence[KVUse], title: str, path: Path) -> None:
    """Plot stacked bars of used and wasted memory, the size of the pool, and how many requests were held."""
    figure = new_figure((9.0, 4.2))
    panels = figure.subplots(1, len(LAYOUTS), sharey=True, squeeze=False)[0]
    for axes, layout in zip(panels, LAYOUTS):
        ours = [use for use in found if use.layout == layout]
        places = range(len(ours))
        used, wasted = (
            [getattr(use, name) / 2**20 for use in ours] for name in ("used_bytes", "wasted_bytes")
        )
        axes.bar(places, used, color=LINES[0], label="used")
        axes.bar(places, wasted, bottom=used, color=LINES[1], label="reserved, unused")
        if ours:
            axes.axhline(ours[0].pool_bytes / 2**20, color=GREY, linestyle="--", label="the pool")
        for place, use in zip(places, ours):
            axes.annotate(
                f"{use.held}", (place, use.reserved_bytes / 2**20), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )  # fmt: skip
        axes.set(title=f"{layout} (figures: requests held)", xlabel="requests sent at once", ylabel="MiB")
        axes.set_xticks(places, [str(use.batch_size) for use in ours])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, title, path)
