"""Every kind of state in the whole engine: chunks, snapshots of prefixes, and drafts of which some are rejected."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import VOCAB, make_reference, reference_greedy

import quire.rank
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.speculation.drafter import DraftContext, Drafter, DraftRows, Speculation
from quire.types import EngineRequest, SamplingParams

torch.set_num_threads(1)
ANSWER = 12
# Gated delta rule, Mamba-2 beside attention, Mamba-1, delta rule per channel, lightning attention. Convolutions alone
# are in tests/e2e/test_switches.py.
CASES = ("qwen3-next", "falcon-h1", "jamba", "kimi-linear", "minimax")


class AnswerDrafter(Drafter):
    """Drafts of the expected answers, with a wrong token at every fifth position."""

    def __init__(self, context: DraftContext, answers: list[list[int]]) -> None:
        self._columns, self._answers = context.columns, answers

    def propose(self, rows: DraftRows) -> None:
        for slot, count in zip(rows.slots.tolist(), rows.counts.tolist()):
            known = int(self._columns.num_tokens[slot])
            own = self._columns.tokens[slot, :known].tolist()
            answer = next(a for a in self._answers if a[:known] == own)[known : known + count]
            drafts = [(t + 1) % VOCAB if at % 5 == 0 else t for at, t in enumerate(answer, known)]
            drafts += [3] * (count - len(drafts))
            self._columns.tokens[slot, known : known + count] = torch.tensor(drafts, dtype=torch.int32)


def engine_of(folder: Path, **settings: Any) -> Engine:
    return build_engine(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", max_model_len=56, block_size=4, max_num_seqs=3,
            max_num_batched_tokens=11, kv_cache_memory=1 << 20, skip_tokenizer_init=True, check_invariants=True,
            **settings,
        )
    )[0]  # fmt: skip


def run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    got: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(number), prompt, params))
        got[str(number)] = []
    while engine.has_work:
        for output in engine.step():
            got[output.id] += output.token_ids
    return list(got.values())


@pytest.mark.parametrize("case", CASES)
def test_snapshots_and_drafts_change_no_token(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, rng = make_reference(case, tmp_path), random.Random(1)
    shared = [rng.randrange(3, VOCAB) for _ in range(17)]
    prompts = [shared + [rng.randrange(3, VOCAB) for _ in range(3 + i)] for i in range(3)]
    expected = [reference_greedy(reference, prompt, ANSWER) for prompt in prompts]
    answers = [prompt + answer for prompt, answer in zip(prompts, expected)]
    monkeypatch.setattr(
        quire.rank,
        "pick_speculation",
        lambda config, load: Speculation(
            lambda context: AnswerDrafter(context, answers), config.spec_tokens or 0
        ),
    )
    plain = engine_of(tmp_path)
    turn = answers[0][:-3] + [5, 9]
    assert run(plain, prompts) == run(plain, prompts) == expected
    assert run(plain, [turn]) == [reference_greedy(reference, turn, ANSWER)]
    assert plain.log.totals.cached_tokens > 3 * len(shared)
    drafting = engine_of(tmp_path, spec_method="ngram", spec_tokens=4, spec_adaptive=False)
    assert run(drafting, prompts) == run(drafting, prompts) == expected
    assert 0 < drafting.log.totals.accepted_tokens < drafting.log.totals.draft_tokens
