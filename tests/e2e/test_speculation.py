"""Speculative decoding changes no output: any drafter, any switches, any sampling parameters.

The drafters of these tests copy the expected answer with mistakes, so drafts are accepted and rejected at all positions.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from switches import GPU_SWITCHES, MAX_LEN, SWITCHES, Bench, defaults, drain, random_settings

import quire.rank
from heads import DraftsWithPauses, record_drafts
from quire import LLM
from quire.core.engine import Engine
from quire.speculation.draft_model import ModelDrafter
from quire.speculation.drafter import DraftContext, Drafter, DraftRows, Speculation
from quire.types import ConfigError, SamplingParams, StructuredOutputsParams
from tiny import write_tiny

DEPTH = 4


class AnswerDrafter(Drafter):
    """Drafts of the tokens that follow in the expected answers; two of seven are wrong, by position.

    It finds the answer by the tokens known so far, because prompts and answers are all different. Graphs can capture it.
    """

    def __init__(self, context: DraftContext, answers: list[list[int]]) -> None:
        self._columns = context.columns
        self._vocab_size = context.vocab_size
        self._answers = torch.full((len(answers), MAX_LEN), -1, dtype=torch.int32)
        for answer, line in zip(answers, self._answers):
            line[: len(answer)] = torch.tensor(answer, dtype=torch.int32)
        self._answers = self._answers.to(context.device)

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
        drafts = torch.where(place % 7 < 2, (drafts + 5) % self._vocab_size, drafts)
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
    draft_answers(bench, monkeypatch)


def draft_answers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines draft the expected answers of `bench`, with mistakes."""
    prompts = {request.id: list(request.prompt) for request in bench.requests}
    answers = [prompts[name] + tokens for name, tokens in bench.expected.items()]
    monkeypatch.setattr(
        quire.rank,
        "pick_speculation",
        lambda config, load: Speculation(
            lambda context: AnswerDrafter(context, answers), config.spec_tokens or 0
        ),
    )


def with_drafts(settings: dict[str, Any], adaptive: bool = False) -> dict[str, Any]:
    return {**settings, "spec_method": "ngram", "spec_tokens": DEPTH, "spec_adaptive": adaptive}


def accepted(engine: Engine) -> int:
    return engine.log.totals.accepted_tokens


@pytest.mark.parametrize("seed", range(5))
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


KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "logprobs": SamplingParams(temperature=0, max_tokens=40, logprobs=3, prompt_logprobs=1),
    "min_tokens": SamplingParams(max_tokens=40, min_tokens=20, stop_token_ids=list(range(0, 2048, 2)), seed=3),
    "bias": SamplingParams(max_tokens=40, logit_bias={7: 4.0, 9: 3.0}, seed=4),
    "allowed": SamplingParams(max_tokens=40, allowed_token_ids=[5, 6, 7], seed=5),
    "bad_words": SamplingParams(temperature=0, max_tokens=40, bad_words=["the", "a little", "was"]),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=40, seed=6),
    "stop": SamplingParams(temperature=0, max_tokens=40, stop=[" a", "."]),
    "n": SamplingParams(n=3, temperature=1.0, top_p=0.9, max_tokens=30, seed=8),
    "regex": SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[a-f ]{30}")
    ),
}  # fmt: skip
PROMPT = "Once upon a time there was a little girl. Once upon a time there was a little girl. Once upon a"


def answers(device: str = "cpu", **settings: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the answers to `KINDS` in one batch, and the engine's counters."""
    fixed = {"dtype": "float32", "max_model_len": 128, "capture_at_start": False, "kv_cache_memory": 64 << 20}
    with LLM("demo", device=device, compile_processes=0, **fixed, **settings) as llm:
        outputs = llm.generate([PROMPT] * len(KINDS), list(KINDS.values()), use_tqdm=False)
        totals = asdict(llm.client.engine.log.totals)
    found = {
        name: [
            (o.text, o.token_ids, o.finish_reason, o.stop_reason, plain_logprobs(o.logprobs))
            for o in output.outputs
        ]
        for name, output in zip(KINDS, outputs)
    }
    return found, totals


def plain_logprobs(logprobs: Any) -> Any:
    """Return log-probabilities by position and token."""
    return logprobs and [{token: entry.logprob for token, entry in at.items()} for at in logprobs]


def approximate(logprobs: Any) -> Any:
    """Return an equivalent that equals close log-probabilities, because these depend on the shape of the batch."""
    return logprobs and [{t: pytest.approx(value, abs=1e-3) for t, value in at.items()} for at in logprobs]


@pytest.fixture(scope="module", params=DEVICES)
def plain_answers(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    found, _ = answers(request.param)
    return request.param, {
        name: [(*rest, approximate(logprobs)) for *rest, logprobs in outputs]
        for name, outputs in found.items()
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"spec_method": "ngram"},
        {"spec_method": "ngram", "overlap": False},
        {"spec_method": "ngram", "max_num_batched_tokens": 24, "prefix_caching": False},
        {"spec_method": "suffix"},
        {"spec_method": "draft", "spec_model": "demo-draft"},
        {
            "spec_method": "draft",
            "spec_model": "demo-draft",
            "max_num_batched_tokens": 24,
            "prefix_caching": False,
        },
    ],
    ids=["ngram", "ngram without overlap", "ngram in chunks", "suffix", "draft", "draft in chunks"],
)
def test_answers_of_all_kinds_are_the_same(
    plain_answers: tuple[str, dict[str, Any]], settings: dict[str, Any]
) -> None:
    device, expected = plain_answers
    drafted, totals = answers(device, **settings, spec_tokens=3, spec_adaptive=False)
    assert drafted == expected
    assert 0 < totals["accepted_tokens"] < totals["draft_tokens"]
    assert sum(totals["accepted_at"]) == totals["accepted_tokens"] and len(totals["accepted_at"]) == 3


def test_a_draft_model_is_right_more_often_than_chance() -> None:
    _, totals = answers(spec_method="draft", spec_model="demo-draft", spec_tokens=2, spec_adaptive=False)
    assert totals["accepted_at"][0] > 0.4 * totals["draft_rows"]


@pytest.mark.parametrize("pause", [3, 40])
def test_a_draft_model_drafts_after_a_pause_what_it_would_generate(
    pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts do not run the draft model, which has to know their tokens later."""
    drafts = record_drafts(monkeypatch, ModelDrafter)
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    with LLM("demo", spec_method="draft", spec_model="demo-draft", spec_tokens=3, **fixed) as llm:
        llm.client.engine.scheduler.depth = DraftsWithPauses(3, pause)  # type: ignore[attr-defined]
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True), use_tqdm=False)
    lengths = [len(known) for known, _ in drafts]
    assert len(lengths) > 6 and max(b - a for a, b in pairwise(lengths)) >= pause
    with LLM("demo-draft", **fixed) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        outputs = llm.generate([known for known, _ in drafts], params, use_tqdm=False)
    assert [drafted for _, drafted in drafts] == [output.outputs[0].token_ids for output in outputs]


def test_a_draft_model_needs_the_same_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="spec_model has another tokenizer than the model: token"):
        LLM("demo", device="cpu", spec_method="draft", spec_model=str(write_tiny(tmp_path / "tiny")))


def test_a_draft_model_stays_within_the_context() -> None:
    """Rows that end with the context run beside rows that draft on: a draft behind the context ended the engine."""
    lengths = (63, 62, 61, 60, 59, 40, 20)
    prompts = [[(7 * i + n) % 256 for i in range(n)] for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    drafts: dict[str, Any] = {"spec_method": "draft", "spec_model": "demo-draft", "spec_tokens": 5}
    answers = []
    for settings in ({}, {**drafts, "spec_adaptive": False}):
        with LLM("demo", device="cpu", dtype="float32", max_model_len=64, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]] == [64 - length for length in lengths]
