"""Speculative decoding changes no output: any drafter, any switches, any sampling parameters.

The drafters of these tests copy the expected answer with mistakes, so drafts are accepted and rejected at all positions.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from switches import GPU_SWITCHES, MAX_LEN, SWITCHES, Bench, defaults, drain, random_settings

import quire.rank
from quire.core.engine import Engine
from quire.speculation.drafter import DraftRows, Speculation

DEPTH = 4


class AnswerDrafter:
    """Drafts of the tokens that follow in the expected answers; two of seven are wrong, by position.

    It finds the answer by the tokens known so far, because prompts and answers are all different. Graphs can capture it.
    """

    def __init__(self, columns: Any, device: torch.device, answers: list[list[int]]) -> None:
        self._columns = columns
        self._answers = torch.full((len(answers), MAX_LEN), -1, dtype=torch.int32)
        for answer, line in zip(answers, self._answers):
            line[: len(answer)] = torch.tensor(answer, dtype=torch.int32)
        self._answers = self._answers.to(device)

    def propose(self, rows: DraftRows) -> None:
        slots, tokens = rows.slots.long(), self._columns.tokens
        own, known = tokens[slots][:, :MAX_LEN], self._columns.num_tokens[slots].long()
        position = torch.arange(MAX_LEN, device=own.device)
        same = (own.unsqueeze(1) == self._answers) | (
            position >= known[:, None, None]
        )  # [rows, answers, length]
        answer = self._answers[same.all(2).int().argmax(1)]
        place = known.unsqueeze(1) + torch.arange(rows.most, device=own.device)
        inside = place.clamp(max=MAX_LEN - 1)
        drafts = answer.gather(1, inside).clamp(min=0)
        drafts = torch.where(place % 7 < 2, (drafts + 5) % 1000, drafts)
        kept = torch.arange(rows.most, device=own.device) < rows.counts.unsqueeze(1)
        tokens[slots.unsqueeze(1), inside] = torch.where(kept, drafts, own.gather(1, inside))


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench("demo-draft", request.param)


@pytest.fixture
def drafting(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {request.id: list(request.prompt) for request in bench.requests}
    answers = [prompts[name] + tokens for name, tokens in bench.expected.items()]
    monkeypatch.setattr(
        quire.rank,
        "pick_speculation",
        lambda config: Speculation(lambda c, d: AnswerDrafter(c, d, answers), config.spec_tokens or 0),
    )


def with_drafts(settings: dict[str, Any], adaptive: bool = False) -> dict[str, Any]:
    return {**settings, "spec_method": "ngram", "spec_tokens": DEPTH, "spec_adaptive": adaptive}


def accepted(engine: Engine) -> int:
    return engine.log.totals.accepted_tokens


@pytest.mark.parametrize("seed", range(8))
def test_any_switches_give_the_same_tokens(bench: Bench, drafting: None, seed: int) -> None:
    rng = random.Random(seed)
    switches = SWITCHES if bench.device == "cpu" else GPU_SWITCHES
    settings = random_settings(rng, switches)
    while settings["kv_layout"] == "none":
        settings = random_settings(rng, switches)
    engine = bench.run(with_drafts(settings), seed)
    totals = engine.log.totals
    assert 0 < totals.accepted_tokens < totals.draft_tokens


def test_drafts_save_steps(bench: Bench, drafting: None) -> None:
    steps = {}
    for settings in (defaults(), with_drafts(defaults())):
        engine = bench.engine(settings)
        for request in bench.requests[:6]:
            engine.add(request)
        got = drain(engine)
        assert got == {name: bench.expected[name] for name in got}
        steps[accepted(engine) > 0] = engine.log.totals.steps
    assert steps[True] < 0.6 * steps[False]
