"""Draw the figures of docs/ideas as SVG: rows of boxes over time or memory.

python tools/draw_ideas.py     writes docs/images/ideas/*.svg
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "ideas"
_CELL, _ROW, _LEFT, _TOP = 52, 34, 160, 46  # pixels
_CHAR = 7.2  # pixels of a character
_COLOURS = {
    "prompt": "#f2b134",
    "token": "#4f86c6",
    "wasted": "#d9d9d9",
    "shared": "#6aa84f",
    "other": "#b48ac9",
    "wrong": "#d9705a",
    "free": "#ffffff",
}


@dataclass(frozen=True)
class Box:
    """A coloured box of a row, from `start` over `length` cells."""

    start: float
    length: float
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Row:
    label: str
    boxes: list[Box] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """Rows under a title. `legend` names the kinds of boxes; `axis` the direction to the right."""

    title: str
    rows: list[Row]
    legend: dict[str, str]
    axis: str = "steps"

    def svg(self) -> str:
        """Return the figure as a standalone SVG document with a background, readable on light and dark pages."""
        cells = max(box.start + box.length for row in self.rows for box in row.boxes)
        legend = sum(40 + _CHAR * len(name) for name in self.legend.values())
        width = max(_LEFT + _CELL * cells + 24, 32 + 1.2 * _CHAR * len(self.title), 16 + legend)
        below = _TOP + _ROW * len(self.rows)
        height = below + 62
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="system-ui, sans-serif" font-size="13" role="img">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#fbfaf7"/>',
            _text(16, 26, self.title, weight="bold"),
        ]
        for index, row in enumerate(self.rows):
            top = _TOP + _ROW * index
            parts.append(_text(_LEFT - 10, top + 19, row.label, anchor="end"))
            parts += [_box(box, top) for box in row.boxes]
        parts.append(_text(_LEFT, below + 18, f"{self.axis} \u2192", colour="#777"))
        left = 16.0
        for kind, name in self.legend.items():
            parts.append(
                f'<rect x="{left:g}" y="{below + 32}" width="14" height="14" rx="3" fill="{_COLOURS[kind]}" stroke="#555"/>'
            )
            parts.append(_text(left + 20, below + 44, name))
            left += 40 + _CHAR * len(name)
        return "\n".join([*parts, "</svg>", ""])


def _box(box: Box, top: float) -> str:
    left, width = _LEFT + _CELL * box.start, _CELL * box.length - 3
    shape = (
        f'<rect x="{left:g}" y="{top + 2:g}" width="{width:g}" height="{_ROW - 8}" rx="4" '
        f'fill="{_COLOURS[box.kind]}" stroke="#555"/>'
    )
    return shape + (_text(left + width / 2, top + 20, box.text, anchor="middle") if box.text else "")


def _text(
    x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", colour: str = "#222"
) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _run(start: float, count: int, kind: str, texts: str = "", width: float = 1) -> list[Box]:
    """Return `count` boxes in a row, labelled by the words of `texts`."""
    words = texts.split()
    return [Box(start + i * width, width, kind, words[i] if i < len(words) else "") for i in range(count)]


def _tokens(start: float, *words: str) -> list[Box]:
    return _run(start, len(words), "token", " ".join(words))


FIGURES = {
    "naive": Figure(
        "Naive decoding computes every token again in every step",
        [
            Row(f"step {n + 1}", [*_run(0, 4, "prompt", "Once upon a time"), *_run(4, n, "wasted", "there was a")])
            for n in range(4)
        ],
        {"prompt": "prompt, computed again", "wasted": "answer so far, computed again"},
        "tokens of one forward pass",
    ),
    "kv-cache": Figure(
        "With a KV cache a step computes one token and reads the others",
        [
            Row("step 1", _run(0, 4, "prompt", "Once upon a time")),
            *(
                Row(
                    f"step {n + 1}",
                    [*_run(0, 3 + n, "shared"), Box(3 + n, 1, "token", ("there", "was", "a")[n - 1])],
                )
                for n in (1, 2, 3)
            ),
        ],
        {"prompt": "prompt, computed", "shared": "keys and values, read", "token": "token, computed"},
        "tokens",
    ),
    "batching": Figure(
        "Static batching waits for the longest answer; continuous batching fills the gap",
        [
            Row("static, slot 1", [Box(0, 3, "token", "A"), Box(3, 5, "wasted", "idle"), Box(8, 4, "other", "C")]),
            Row("static, slot 2", [Box(0, 8, "token", "B"), Box(8, 3, "other", "D"), Box(11, 1, "wasted")]),
            Row("continuous, slot 1", [Box(0, 3, "token", "A"), Box(3, 4, "other", "C"), Box(7, 5, "other", "E")]),
            Row("continuous, slot 2", [Box(0, 8, "token", "B"), Box(8, 3, "other", "D"), Box(11, 1, "other", "F")]),
        ],
        {"token": "first batch", "other": "later requests", "wasted": "slot without work"},
    ),
    "paged-kv-cache": Figure(
        "Contiguous memory reserves the longest answer; blocks are taken as tokens come",
        [
            Row("contiguous, A", [Box(0, 3, "token", "A"), Box(3, 5, "wasted", "reserved")]),
            Row("contiguous, B", [Box(0, 2, "other", "B"), Box(2, 6, "wasted", "reserved")]),
            Row("paged", [
                Box(0, 1, "token", "A0"), Box(1, 1, "other", "B0"), Box(2, 1, "token", "A1"), Box(3, 1, "token", "A2"),
                Box(4, 1, "other", "B1"), Box(5, 1, "free", "free"), Box(6, 1, "free", "free"), Box(7, 1, "free", "free"),
            ]),
        ],
        {"token": "tokens of A", "other": "tokens of B", "wasted": "reserved, unused", "free": "free block"},
        "memory",
    ),
    "chunked-prefill": Figure(
        "A whole prompt stops every answer; chunks let them run on",
        [
            Row("whole, answers", [*_run(0, 2, "token"), Box(2, 5, "wasted", "wait"), *_run(7, 3, "token")]),
            Row("whole, prompt", [Box(2, 5, "prompt", "prompt of 5 chunks")]),
            Row("chunked, answers", _run(0, 10, "token")),
            Row("chunked, prompt", [Box(2 + i, 1, "prompt", str(i + 1)) for i in range(5)]),
        ],
        {"token": "one token of each answer", "prompt": "prompt tokens", "wasted": "no tokens"},
        "time",
    ),
    "prefix-caching": Figure(
        "Requests that begin with the same blocks share them",
        [
            Row("request 1", [*_run(0, 3, "prompt", "S0 S1 S2"), *_run(3, 2, "token", "a0 a1")]),
            Row("request 2", [*_run(0, 3, "shared", "S0 S1 S2"), *_run(3, 1, "token", "b0")]),
            Row("request 3", [*_run(0, 2, "shared", "S0 S1"), *_run(2, 3, "token", "c0 c1 c2")]),
        ],
        {"prompt": "computed once", "shared": "found in the cache", "token": "of one request"},
        "blocks of the sequence",
    ),
    "fused-kernels": Figure(
        "Separate kernels read and write their data in between; a fused one keeps it",
        [
            Row("separate", [
                Box(0, 1, "other", "norm"), Box(1.3, 2, "token", "gate, up"), Box(3.6, 1, "other", "SiLU"),
                Box(4.9, 1, "other", "times"), Box(6.2, 2, "token", "down"), Box(8.5, 1, "other", "add"),
            ]),
            Row("fused", [Box(0, 2.9, "token", "norm, gate, up, SiLU"), Box(3.2, 2.2, "token", "down, add")]),
        ],
        {"token": "reads weights", "other": "reads and writes activations"},
        "time",
    ),
    "cuda-graphs": Figure(
        "The host launches kernels one by one, or replays all of them at once",
        [
            Row("eager, host", _run(0, 9, "other")),
            Row("eager, GPU", [Box(0.6 + i, 0.55, "token") for i in range(9)]),
            Row("graph, host", [Box(0, 1, "other", "replay")]),
            Row("graph, GPU", [Box(0.6 + 0.55 * i, 0.55, "token") for i in range(9)]),
        ],
        {"other": "launches", "token": "kernels"},
        "time",
    ),
    "persistent-kernel": Figure(
        "Kernels end before the next one reads; one kernel reads weights all the time",
        [
            Row("kernels, memory", [Box(2 * i + 0.6, 1.2, "token", f"weight {i + 1}") for i in range(4)]),
            Row("kernels, blocks", [Box(2 * i, 2, "wasted" if i % 2 else "free", f"kernel {i + 1}") for i in range(4)]),
            Row("one kernel, memory", [Box(1.2 * i, 1.2, "token", f"weight {i + 1}") for i in range(4)]),
            Row("one kernel, blocks", [
                box for i in range(4) for box in (Box(1.4 * i, 1, "shared", f"stage {i + 1}"), Box(1.4 * i + 1, 0.4, "other"))
            ]),
        ],
        {"token": "weights arrive", "shared": "products", "other": "results on their way"},
        "time",
    ),
    "overlap": Figure(
        "Scheduling of the next step runs while the device computes this one",
        [
            Row("in turns, host", [Box(3 * i, 1, "other", f"plan {i + 1}") for i in range(3)]),
            Row("in turns, device", [Box(3 * i + 1, 2, "token", f"step {i + 1}") for i in range(3)]),
            Row("overlapped, host", [Box(0, 1, "other", "plan 1"), *(Box(2 * i - 1 + 0.02, 1, "other", f"plan {i + 1}") for i in (1, 2, 3))]),
            Row("overlapped, device", [Box(1 + 2 * i, 2, "token", f"step {i + 1}") for i in range(4)]),
        ],
        {"other": "host", "token": "device"},
        "time",
    ),
    "quantised-weights": Figure(
        "A decode step reads every weight once, so fewer bits are less time",
        [
            Row("bfloat16", [Box(0, 8, "token", "16 bits of each weight")]),
            Row("INT8, FP8", [Box(0, 4, "token", "8 bits"), Box(4, 0.3, "other")]),
            Row("INT4", [Box(0, 2, "token", "4 bits"), Box(2, 0.4, "other")]),
        ],
        {"token": "numbers", "other": "scales"},
        "bytes read in a step",
    ),
    "speculation": Figure(
        "One step verifies several guesses; the right ones are kept",
        [
            Row("plain", [Box(2 * i, 2, "token", word) for i, word in enumerate(("the", "cat", "sat", "on", "a"))]),
            Row("drafts", [*_run(0, 3, "other", "cat sat up", 0.8), *_run(4.6, 3, "other", "a mat .", 0.8)]),
            Row("verified", [
                Box(2.4, 2.2, "shared", "cat sat on"), Box(7, 2.2, "shared", "a mat . It"),
            ]),
        ],
        {"token": "step of one token", "other": "draft tokens, cheap", "shared": "step of four tokens"},
        "time",
    ),
    "tensor-parallelism": Figure(
        "Each GPU has a part of every weight; sums join the parts",
        [
            Row(f"GPU {i}", [
                Box(0, 2, "token", "attention"), Box(2.1, 0.8, "wrong", "sum"), Box(3, 2, "token", "MLP"), Box(5.1, 0.8, "wrong", "sum"),
                Box(6, 2, "token", "attention"), Box(8.1, 0.8, "wrong", "sum"),
            ])
            for i in range(2)
        ],
        {"token": "half of the heads, half of the columns", "wrong": "all-reduce"},
        "time",
    ),
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(figure.svg(), encoding="utf-8")
        print(f"docs/images/ideas/{name}.svg")


if __name__ == "__main__":
    main()
