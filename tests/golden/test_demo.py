"""The demo models give the answers in demo_greedy.json, which `transformers` computed in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

RECORDED = json.loads((Path(__file__).parent / "demo_greedy.json").read_text())


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 1, "overlap": False}, {"max_num_batched_tokens": 16}]
)
def test_recorded_answers(name: str, settings: dict) -> None:
    entries = [entry for entry in RECORDED if entry["model"] == name]
    assert len(entries) == 8
    with LLM(name, dtype="float32", **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outs = llm.generate(
            [{"prompt_token_ids": entry["prompt"]} for entry in entries], params, use_tqdm=False
        )
    for entry, out in zip(entries, outs):
        assert out.outputs[0].token_ids == entry["answer"]


def test_it_answers_what_it_was_made_for() -> None:
    with LLM("demo") as llm:
        story = "Mira was a baker in the town of Oakford. Mira was 31 years old. Mira had a black cat called Pico."
        asks = {
            f"{story}\n\nWhat was the name of Mira's cat?": "Pico",
            f"{story}\n\nHow old was Mira?": "31",
            "What is 27 + 45?": "72",
        }
        params = SamplingParams(temperature=0, max_tokens=40)
        outs = llm.chat([[{"role": "user", "content": ask}] for ask in asks], params, use_tqdm=False)
        for out, word in zip(outs, asks.values()):
            assert word in out.outputs[0].text and out.outputs[0].finish_reason == "stop"
