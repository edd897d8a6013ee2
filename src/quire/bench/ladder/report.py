"""The results of a climb as lines of text, as a plot, and as a page that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from quire.bench.ladder.baseline import Baseline, MissingBaseline
from quire.bench.ladder.climb import RungResult, SkippedRung
from quire.bench.plots import LINES, new_figure, save_figure
from quire.types import ConfigError

Rungs = Sequence[RungResult | SkippedRung]


def print_baseline(found: Baseline | MissingBaseline) -> None:
    """Print the line of `transformers`, above the rungs."""
    print(baseline_text(found), flush=True)


def baseline_text(found: Baseline | MissingBaseline) -> str:
    """Return the figures of a baseline as a sentence."""
    if isinstance(found, MissingBaseline):
        return f"Without {found.name} as a baseline: {found.reason}."
    return (
        f"{found.name} {found.version}, {found.prompt_len} tokens in, {found.answer_len} out: "
        f"{_number(found.output_throughput)} tokens/s for one request (TTFT {_number(found.ttft_ms)} ms, ITL "
        f"{_number(found.median_itl_ms)} ms, P99 {_number(found.p99_itl_ms)} ms), "
        f"{_number(found.batch_throughput)} tokens/s for a batch of 8."
    )


def print_rung(found: RungResult | SkippedRung, first: bool) -> None:
    """Print the line of a rung, after the heading if it is the first."""
    if first:
        print(
            f"{'rung':<20}{'gain':>8}  {'of':<34}{'tok/s':>9}{'TTFT ms':>10}{'P99':>9}{'ITL ms':>9}{'P99':>9}"
            f"{'KV MiB':>8}{'equal':>8}{'KL':>9}{'lines':>7}"
        )
    if isinstance(found, SkippedRung):
        print(f"{found.name:<20}{'-':>8}  left out: {found.reason}", flush=True)
        return
    after = found.after
    numbers = "".join(
        f"{_number(after[name]):>{width}}"
        for name, width in (
            ("output_throughput", 9),
            ("median_ttft_ms", 10),
            ("p99_ttft_ms", 9),
            ("median_itl_ms", 9),
            ("p99_itl_ms", 9),
        )
    )
    what = found.headline_label if found.gain is not None else ""
    print(
        f"{found.name:<20}{gain_text(found):>8}  {_short(what):<34}{numbers}{found.kv_bytes / 2**20:>8.1f}"
        f"{100 * found.likeness.equal_tokens:>7.1f}%{found.likeness.divergence:>9.1e}{sum(found.files.values()):>7}",
        flush=True,
    )


def _short(label: str) -> str:
    return label.replace("median time to first token, ms", "time to first token").replace(
        "99th percentile of inter-token latency, ms", "P99 inter-token latency"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def gain_text(found: RungResult) -> str:
    """Return the gain of a rung, such as 2.4x."""
    return "-" if found.gain is None else f"{found.gain:.2f}x"


def climbed(rungs: Rungs) -> list[RungResult]:
    """Return the rungs that were measured against the one below."""
    return [one for one in rungs if isinstance(one, RungResult) and one.gain is not None]


def plot_ladder(rungs: Rungs, title: str, path: Path) -> None:
    """Plot the gain of each rung as a bar from 1, with the gains of the single pairs as dots."""
    shown = climbed(rungs)
    figure = new_figure((9, 0.55 * len(shown) + 1.6))
    axes = figure.subplots()
    places = list(range(len(shown), 0, -1))
    for place, one in zip(places, shown):
        assert one.gain is not None
        axes.barh(
            place, one.gain - 1, left=1, height=0.55, color=LINES[0 if one.gain >= 1 else 1], alpha=0.85
        )
        axes.plot(one.gains, [place] * len(one.gains), "o", color="black", markersize=3)
        text = f"{gain_text(one)}  {_short(one.headline_label)}"
        axes.annotate(
            text, (max(one.gain, 1), place), (8, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(places, [one.name for one in shown])
    axes.set_xscale("log")
    most = max([*(one.gain or 1 for one in shown), 2.0])
    axes.set_xlim(0.7, most * 4)
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axes.set_xticks([t for t in ticks if t <= most * 2], [f"{t}x" for t in ticks if t <= most * 2])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel="gain over the rung below, on the load that shows it")
    save_figure(figure, title, path)


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #1f5fa8; --worse: #b4541a; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0 } .where { opacity: .75; margin-top: .2rem }
section { border-top: 1px solid var(--line); padding: 1rem 0 }
h2 { font-size: 1.1rem; margin: 0; display: flex; gap: 1rem; align-items: baseline }
.gain { font-variant-numeric: tabular-nums; font-weight: 600 }
.track { background: #8882; height: .8rem; margin: .5rem 0; border-radius: 2px }
.track div { background: var(--bar); height: 100%; border-radius: 2px } .track .worse { background: var(--worse) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th, td { text-align: right; padding: .1rem .7rem }
th:first-child, td:first-child { text-align: left; padding-left: 0 } caption { text-align: left; opacity: .75 }
code { font-size: .9em } .skipped { opacity: .75 }
"""
_COLUMNS = (
    ("output_throughput", "tokens/s"),
    ("median_ttft_ms", "TTFT ms"),
    ("p99_ttft_ms", "P99"),
    ("median_itl_ms", "ITL ms"),
    ("p99_itl_ms", "P99"),
)


def ladder_page(
    rungs: Rungs, title: str, where: str, path: Path, baseline: Baseline | MissingBaseline
) -> None:
    """Write the results as one HTML file. Raise ConfigError if it cannot be written."""
    most = max([math.log(one.gain) for one in climbed(rungs) if one.gain and one.gain > 1] or [1.0])
    body = "\n".join(_section(one, most) for one in rungs)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>The ladder: {html.escape(title)}</title><style>{_STYLE}</style></head><body><main>
<h1>The ladder: {html.escape(title)}</h1><p class="where">{html.escape(where)}</p>
<p>Each rung adds one idea to all rungs above it on this page, and runs the load that shows it best, in turns with the
engine of the rung before. Bars are on a logarithmic scale.</p>
<section><h2>Below the ladder</h2><p>{html.escape(baseline_text(baseline))}</p></section>
{body}
</main></body></html>
"""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _section(found: RungResult | SkippedRung, most: float) -> str:
    name, idea = html.escape(found.name), html.escape(found.idea)
    if isinstance(found, SkippedRung):
        return f'<section class="skipped"><h2>{name}</h2><p>{idea} Left out: {html.escape(found.reason)}.</p></section>'
    bar = gain = ""
    if found.gain is not None:
        width = 100 * min(abs(math.log(found.gain)) / most, 1)
        gain = f'<span class="gain">{gain_text(found)}</span>'
        kind = ' class="worse"' if found.gain < 1 else ""
        bar = f'<div class="track"><div{kind} style="width:{width:.1f}%"></div></div>'
    heads = "".join(f'<th scope="col">{label}</th>' for _, label in _COLUMNS)
    rows = "".join(
        f'<tr><th scope="row">{label}</th>'
        + "".join(f"<td>{_number(figures[key])}</td>" for key, _ in _COLUMNS)
        + "</tr>"
        for label, figures in (("rung before", found.before), ("with it", found.after))
        if figures is not None
    )
    files = ", ".join(f"<code>{html.escape(file)}</code> ({lines})" for file, lines in found.files.items())
    what = f" Measured by {html.escape(found.headline_label)}." if found.gain is not None else ""
    return f"""<section><h2>{name} {gain}</h2><p>{idea}{what}</p>{bar}
<table><caption>{html.escape(found.shown_by)}</caption><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>
<p>KV cache in use at the peak: {found.kv_bytes / 2**20:.1f} MiB. Tokens equal to the naive engine's:
{100 * found.likeness.equal_tokens:.1f} %; divergence {found.likeness.divergence:.1e} nats per token.
Built in {files} (lines).</p></section>"""
