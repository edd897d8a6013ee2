"""Plots of results as PNG, SVG or PDF, by the file's suffix. Needs matplotlib (`pip install 'quire-llm[bench]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from quire.bench.metrics import latencies_ms, percentile, rates
from quire.bench.run import Run
from quire.types import ConfigError

_SUFFIXES = (".png", ".svg", ".pdf")
_BLUE, _ORANGE, GREY = "#1f5fa8", "#d9711c", "#8a8a8a"
LINES = (_BLUE, _ORANGE, "#3a8f5c", "#8450a0")  # colours of several curves in one panel
_MARKED = (50, 90, 99)  # percentiles labelled on a curve
_BINS = 60  # intervals of a timeline


def check_plot(path: Path) -> None:
    """Raise ConfigError if `path` has no supported suffix or matplotlib is missing. Call it before a run."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"plot must end in {', '.join(_SUFFIXES)}, got {path.name!r}")
    _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'quire-llm[bench]'") from None
    return Figure


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty figure of `size` inches."""
    return _figure_class()(figsize=size, layout="constrained")


def plot_serving(run: Run, title: str, path: Path) -> None:
    """Plot the percentiles of three latencies, and output tokens, prompt tokens and requests over time."""
    figure = new_figure((15, 7.5))
    (ttft, itl, e2el), (output, prompts, requests) = figure.subplots(2, 3)
    found = latencies_ms(run)
    _percentiles(ttft, found["ttft"], "Time to first token")
    _percentiles(itl, found["itl"], "Inter-token latency")
    _percentiles(e2el, found["e2el"], "End-to-end latency")
    width_s = bin_width_s(run.duration_s, found["itl"])
    _output_over_time(output, run, width_s)
    _prompts_over_time(prompts, run, width_s)
    _requests_over_time(requests, run)
    save_figure(figure, title, path)


def bin_width_s(duration_s: float, itls_ms: Sequence[float]) -> float:
    """Return the width of the intervals of a timeline: no narrower than a step.

    Narrower intervals would show a comb of empty and full ones. The 99th percentile of the inter-token latencies stands
    for the longest step.
    """
    step_s = percentile(itls_ms, 99) / 1e3 if itls_ms else 0.0
    return max(duration_s / _BINS, min(step_s, duration_s), 1e-3)


def plot_sweep(batches: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot throughput and latencies over the batch size; `batches` are results of `latency`, ascending."""
    figure = new_figure((11, 4.2))
    left, right = figure.subplots(1, 2)
    sizes = [found["batch_size"] for found in batches]
    rate = [found["output_throughput"] for found in batches]
    limit = [found["output_throughput"] / found["share_of_limit"] for found in batches]
    left.plot(sizes, limit, color=GREY, linestyle="--", label="the machine's limit")
    left.plot(sizes, rate, color=_BLUE, marker="o", label="measured")
    for size, value, found in zip(sizes, rate, batches):
        text = f"{value:,.0f}\n({100 * found['share_of_limit']:.0f} %)"
        left.annotate(
            text, (size, value), (0, -9), textcoords="offset points", ha="center", va="top", fontsize=8
        )
    left.set(title="Throughput", ylabel="output tokens/s", ylim=(min(rate) / 2.5, max(limit) * 1.5))
    _latencies(right, sizes, batches)
    tick_each((left, right), sizes, "batch size")
    save_figure(figure, title, path)


def plot_users(levels: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot throughput and latencies over the number of users; `levels` are results of `serving`, ascending."""
    figure = new_figure((11, 4.2))
    left, right = figure.subplots(1, 2)
    users = [found["max_concurrency"] for found in levels]
    rate = [found["output_throughput"] for found in levels]
    left.plot(
        users, [rate[0] * n / users[0] for n in users], color=GREY, linestyle="--", label="linear scaling"
    )
    left.plot(users, rate, color=_BLUE, marker="o", label="measured")
    for n, value in zip(users, rate):
        text = f"{value:,.0f}"
        left.annotate(
            text, (n, value), (0, -9), textcoords="offset points", ha="center", va="top", fontsize=8
        )
    left.set(title="Throughput", ylabel="output tokens/s", ylim=(min(rate) / 2.5, max(rate) * 4))
    _latencies(right, users, levels)
    tick_each((left, right), users, "users")
    save_figure(figure, title, path)


def _latencies(axes: Any, places: Sequence[int], found: Sequence[dict[str, Any]]) -> None:
    for name, label, color, line in (
        ("p99_ttft_ms", "P99 TTFT", _ORANGE, ":"),
        ("median_ttft_ms", "median TTFT", _ORANGE, "-"),
        ("p99_itl_ms", "P99 ITL", _BLUE, ":"),
        ("median_itl_ms", "median ITL", _BLUE, "-"),
    ):
        values = [one.get(name) for one in found]
        if None not in values:  # answers of one token have no inter-token latency
            axes.plot(places, values, color=color, linestyle=line, marker="o", label=label)
    axes.set(title="Latency", ylabel="ms")


def tick_each(panels: Sequence[Any], places: Sequence[int], label: str) -> None:
    """Set logarithmic axes with a tick at each of `places`."""
    for axes in panels:
        _grid(axes)
        _log_scale(axes)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set(xlabel=label, xlim=(min(places) / 1.4, max(places) * 1.4))
        axes.legend(frameon=False, fontsize=8)


def _percentiles(axes: Any, values: Sequence[float], title: str) -> None:
    """Plot `values` over their percentiles."""
    axes.set(title=title, xlabel="percentile", ylabel="ms", xlim=(0, 100))
    _grid(axes)
    if not values:
        axes.text(50, 0.5, "no data", ha="center", color=GREY)
        return
    ordered = sorted(values)
    places = [100 * i / max(len(ordered) - 1, 1) for i in range(len(ordered))]
    axes.plot(places, ordered, color=_BLUE)
    for p in _MARKED:
        value = percentile(ordered, p)
        axes.plot([p], [value], "o", color=_ORANGE)
        text = f"P{p}: {value:,.0f} ms" if value >= 100 else f"P{p}: {value:.3g} ms"
        lift = 5 if p < 99 else 13  # P90 and P99 are often close together
        axes.annotate(text, (p, value), (-6, lift), textcoords="offset points", ha="right", fontsize=8)
    low = percentile(ordered, 1)
    if 0 < 20 * low < ordered[-1]:
        _log_scale(axes)
        axes.set_ylim(low / 1.5, ordered[-1] * 2)
    else:
        axes.set_ylim(0, ordered[-1] * 1.15)


def _output_over_time(axes: Any, run: Run, width_s: float) -> None:
    out = rates([at for one in run.completed for at in one.token_times_s], width_s, run.duration_s)
    pieces = sum(len(one.token_times_s) for one in run.completed)
    out = [rate * sum(one.output_len for one in run.completed) / pieces for rate in out]
    _timeline(axes, out, width_s, run.duration_s)
    axes.set(title=f"Output (intervals of {width_s * 1e3:,.0f} ms)", ylabel="tokens/s")


def _prompts_over_time(axes: Any, run: Run, width_s: float) -> None:
    """Plot the prompt tokens computed in each step or, for a server, those of the requests that get a first token."""
    computed = [0.0] * len(rates([], width_s, run.duration_s))
    if run.steps:
        done = [
            (record.time_s - run.begin_s, sum(n for _, _, n in record.rows if n > 1)) for record in run.steps
        ]
    else:
        done = [(one.token_times_s[0], one.prompt_len - one.cached_tokens) for one in run.completed]
    for at_s, tokens in done:
        computed[min(int(at_s / width_s), len(computed) - 1)] += tokens / width_s
    _timeline(axes, computed, width_s, run.duration_s)
    axes.set(title="Prompts" + ("" if run.steps else ", at their first token"), ylabel="tokens/s")


def _timeline(axes: Any, values: Sequence[float], width_s: float, duration_s: float) -> None:
    _grid(axes)
    edges = [min(i * width_s, duration_s) for i in range(len(values) + 1)]
    axes.stairs(values, edges, color=_BLUE)
    axes.set(xlabel="time (s)", xlim=(0, duration_s), ylim=(0, max(values) * 1.1 or 1))


def _requests_over_time(axes: Any, run: Run) -> None:
    if run.steps:
        times = [record.time_s - run.begin_s for record in run.steps]
        axes.step(times, [r.running for r in run.steps], color=_BLUE, where="post", label="running")
        axes.step(times, [r.waiting for r in run.steps], color=_ORANGE, where="post", label="waiting")
    else:
        open_requests, streaming = _open_over_time(run)
        axes.step(*open_requests, color=_ORANGE, where="post", label="open")
        axes.step(*streaming, color=_BLUE, where="post", label="streaming")
    axes.set(title="Requests", xlabel="time (s)", ylabel="requests", xlim=(0, run.duration_s), ylim=(0, None))
    axes.yaxis.get_major_locator().set_params(integer=True)
    _grid(axes)
    axes.legend(frameon=False, fontsize=8)


Curve = tuple[list[float], list[int]]


def _open_over_time(run: Run) -> tuple[Curve, Curve]:
    """Return the number of open requests over time, and of those that have received a token."""

    def curve(begins: list[float]) -> Curve:
        ends = [one.token_times_s[-1] for one in run.completed]
        changes = sorted([(at, 1) for at in begins] + [(at, -1) for at in ends])
        return [at for at, _ in changes], list(accumulate(change for _, change in changes))

    return curve([one.start_s for one in run.completed]), curve(
        [one.token_times_s[0] for one in run.completed]
    )


def _log_scale(axes: Any) -> None:
    """Set a logarithmic y axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _grid(axes: Any) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def save_figure(figure: Any, title: str, path: Path) -> None:
    """Write a figure under its title. Raises ConfigError if the file cannot be written."""
    figure.suptitle(title, fontsize=11)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
