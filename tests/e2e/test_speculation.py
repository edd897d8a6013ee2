"""Speculative decoding changes no output: any drafter, any switches, any sampling parameters.

The drafters of these tests copy the expected answer with mistakes, so drafts are accepted and rejected at all positions.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from switches import Bench, defaults, drain, random_settings

import quire.rank
from quire.core.engine import Engine
from quire.speculation.drafter import DraftRows, Speculation
from quire.types import EngineRequest, SamplingParams

DEPTH = 4


class NoisyDrafter:
    """Drafts of the tokens that follow in the expected answers, of which some are wrong.

    It finds the answer by the tokens known so far: prompts and answers are all different.
    """

    def __init__(self, columns: Any, device: torch.device, answers: list[list[int]]) -> None:
        self._columns, self._answers = columns, answers
        self._rng = random.Random(0)

    def propose(self, rows: DraftRows) -> None:
        for slot, count in zip(rows.slots.tolist(), rows.counts.tolist()):
            known = int(self._columns.num_tokens[slot])
            tokens = self._columns.tokens[slot]
            seen = tokens[:known].tolist()
            rest = next((a[known:] for a in self._answers if a[:known] == seen), [])
            for j in range(count):
                right = j < len(rest) and self._rng.random() < 0.75
                tokens[known + j] = rest[j] if right else self._rng.randrange(1500)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("demo-draft")


@pytest.fixture
def drafting(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {request.id: list(request.prompt) for request in bench.requests}
    answers = [prompts[name] + tokens for name, tokens in bench.expected.items()]
    monkeypatch.setattr(
        quire.rank,
        "pick_speculation",
        lambda config: Speculation(lambda c, d: NoisyDrafter(c, d, answers), config.spec_tokens or 0),
    )


def with_drafts(settings: dict[str, Any], adaptive: bool = False) -> dict[str, Any]:
    return {**settings, "spec_method": "ngram", "spec_tokens": DEPTH, "spec_adaptive": adaptive}


def accepted(engine: Engine) -> int:
    return engine.log.totals.accepted_tokens


@pytest.mark.parametrize("seed", range(8))
def test_any_switches_give_the_same_tokens(bench: Bench, drafting: None, seed: int) -> None:
    rng = random.Random(seed)
    settings = random_settings(rng)
    while settings["kv_layout"] == "none":
        settings = random_settings(rng)
    engine = bench.run(with_drafts(settings), seed)
    totals = engine.log.totals
    assert totals.draft_tokens == 0 or 0 < totals.accepted_tokens < totals.draft_tokens


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
