"""Every program in examples/, run in this process with the demo model."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import pytest
from serving import Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# What each program must print, by name; the clients get the address of a server.
PRINTS = {
    "offline_batch": ["Once upon a time ...", "In the old house by the sea ..."],
    "chat": ["27 + 45 = 72  (0 of 18 prompt tokens cached)", "2 + 3 = 5  (16 of 46 prompt tokens cached)"],
    "structured_extraction": ["{'name': 'Mira', ", "'age': ", "'town': "],
    "embedding_search": ["  27 + 45 = 72"],
    "rag": ["When is the market open?", "  0 of 99 prompt tokens cached", "  80 of 97 prompt tokens cached"],
    "speculative_decoding": ["ngram: the same answers, ", "draft: the same answers, "],
    "quantised_weights": ["auto: ", "int8: ", "int4: ", " MiB of weights: 27 + 45 = 72"],
    "several_gpus": ["1 rank(s): Once upon a time", "2 rank(s): Once upon a time", "\nequal\n"],
    "streaming_client": ["27 + 45 = 72\n(11 tokens)"],
    "tool_loop": [
        'get_weather({"city": "Oakford"}) -> ',
        "The weather in Oakford is sunny, with 22 degrees.",
    ],
}
CLIENTS = {"streaming_client", "tool_loop"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example(
    path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = []
    if path.stem in CLIENTS:
        demo: Server = request.getfixturevalue("demo")
        flags = ["--url", f"{demo.url}/v1"]
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 27 + 45?\nWhat is 2 + 3?\n"))
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    for text in PRINTS[path.stem]:
        assert text in printed
