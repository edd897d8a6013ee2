"""Every method of speculation under random switches, states and ranks changes no output.

Heads with random weights are hardly ever right. So the expected answer with mistakes replaces their drafts after they
have run, and drafts are accepted and rejected at all positions while heads and draft models keep their entries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from switches import SWITCHES, Bench, defaults, legal, make_requests, random_settings
from test_speculation import DEPTH, AnswerDrafter

import quire.rank
from heads import run, write_eagle, write_eagle3, write_mtp
from quire.attention.base import ForwardBatch
from quire.speculation.drafter import DraftContext, Drafter, DraftRows
from quire.types import SlotAdmission, StepPlan
from tiny import write_hybrid, write_tiny

RUNS = 3
# Preempts requests, and lets others find the blocks of their beginnings.
CROWDED = {"kv_layout": "paged", "blocks": "tight", "max_num_seqs": 8, "prefix_caching": None}
pick = quire.rank.pick_speculation


class CorrectedDrafter(Drafter):
    """A drafter that runs, and whose drafts are then replaced."""

    def __init__(self, drafter: Drafter, answers: AnswerDrafter) -> None:
        self.drafter, self._answers = drafter, answers

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        self.drafter.admit(admissions)

    def keep_up(self, plan: StepPlan) -> None:
        self.drafter.keep_up(plan)

    def follow(self, batch: ForwardBatch) -> None:
        self.drafter.follow(batch)

    def propose(self, rows: DraftRows) -> None:
        self.drafter.propose(rows)
        self._answers.propose(rows)


def correct_drafts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the drafts of all engines by the expected answers of `bench`, with mistakes."""
    prompts = {request.id: list(request.prompt) for request in bench.requests}
    answers = [prompts[name] + tokens for name, tokens in bench.expected.items()]

    def corrected(config: Any, loader: Any) -> Any:
        usual = pick(config, loader)

        def make(context: DraftContext) -> CorrectedDrafter:
            return CorrectedDrafter(usual.make(context), AnswerDrafter(context, answers))

        def observe(model: Any, drafter: Any) -> Any:
            return usual.observe(model, drafter.drafter)

        return replace(usual, make=make, observe=observe)

    monkeypatch.setattr(quire.rank, "pick_speculation", corrected)


def settings_of(seed: int, method: dict[str, Any], crowded: bool) -> dict[str, Any]:
    """Return random settings with drafts, adaptive in every third run, which makes pauses."""
    rng = random.Random(seed)
    while True:
        settings = random_settings(rng, SWITCHES)
        drafts = {**method, "spec_tokens": DEPTH, "spec_adaptive": seed % 3 == 2}
        if crowded and seed % 2:
            settings |= CROWDED
        if settings["kv_layout"] != "none" and legal({**settings, **drafts}):
            return {**settings, **drafts}


def run_all(bench: Bench, method: dict[str, Any], monkeypatch: pytest.MonkeyPatch, crowded: bool) -> None:
    correct_drafts(bench, monkeypatch)
    bench.engine({**defaults(), **method, "kv_layout": "contiguous", "spec_tokens": DEPTH})
    bench.token_bytes = (
        bench.info.block_bytes // bench.info.block_size
    )  # with the layers of the draft network
    accepted = preempted = 0
    for seed in range(RUNS):
        totals = bench.run(settings_of(seed, method, crowded), seed).log.totals
        accepted += totals.accepted_tokens
        preempted += totals.preemptions
        assert seed % 3 == 2 or totals.accepted_tokens < totals.draft_tokens
    assert accepted and (preempted or not crowded)


class FreshBench(Bench):
    """A `Bench` that loads the model for every engine: heads of the model's own checkpoint read it."""

    def _load(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = self._original(config, *args, **kwargs)
        self.num_layers = len(loaded[0].attention_layers)
        return loaded


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.set_num_threads(1)
    return Bench("demo")


def write_demo_head(folder: Path, target: int = 384) -> None:
    """Write an EAGLE-3 head for the built-in model, or for `demo-draft` with a `target` of 128."""
    sizes = {"vocab_size": 2048, "target_hidden_size": target, "max_position_embeddings": 512}
    taps = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]} if target == 128 else {}
    write_eagle3(folder, taps=3, target=target, **sizes, **taps)


@pytest.fixture(scope="module")
def demo_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An EAGLE-3 head for the built-in model."""
    folder = tmp_path_factory.mktemp("heads") / "eagle3"
    write_demo_head(folder)
    return str(folder)


@pytest.mark.parametrize("method", ["suffix", "draft", "eagle", "eagle3"])
def test_random_switches(
    bench: Bench, demo_head: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = {"draft": {"spec_model": "demo-draft"}, "eagle3": {"spec_model": demo_head}}
    if method == "eagle":
        write_eagle(tmp_path / "head", hidden=384, vocab_size=2048, max_position_embeddings=512)
        networks["eagle"] = {"spec_model": str(tmp_path / "head")}
    run_all(bench, {"spec_method": method, **networks.get(method, {})}, monkeypatch, crowded=False)


def test_random_switches_with_the_layer_for_mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    bench = FreshBench(str(write_mtp(tmp_path)), requests=make_requests(random.Random(7))[:12])
    run_all(bench, {"spec_method": "mtp"}, monkeypatch, crowded=True)


def test_layers_with_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    model, head = write_hybrid(tmp_path), tmp_path / "head"
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    write_eagle3(head, taps=3, vocab_size=1600, max_position_embeddings=256, **taps)
    bench = Bench(str(model), requests=make_requests(random.Random(7))[:12])
    run_all(bench, {"spec_method": "eagle3", "spec_model": str(head)}, monkeypatch, crowded=True)


def test_layers_with_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of the head stay while those of other layers are released behind their window."""
    torch.set_num_threads(1)
    model, head = write_mtp(tmp_path / "model"), tmp_path / "head"
    write_eagle3(head, vocab_size=1600, max_position_embeddings=256, eagle_aux_hidden_state_layer_ids=[-1, 0])
    bench = Bench(str(model), requests=make_requests(random.Random(7))[:12], windows=(9, None))
    run_all(bench, {"spec_method": "eagle3", "spec_model": str(head)}, monkeypatch, crowded=False)
    assert bench.info.kv_groups == [(2, None), (1, 9)]


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_two_ranks(tmp_path: Path, method: str) -> None:
    """EAGLE heads are whole on each rank, the layer for multi-token prediction is cut."""
    drafts: dict[str, Any] = {"spec_method": method, "spec_tokens": 3, "spec_adaptive": False}
    if method == "mtp":
        model = write_mtp(tmp_path / "model")
    else:
        model = write_tiny(tmp_path / "model")
        if method == "eagle":
            write_eagle(tmp_path / "head")
        else:
            write_eagle3(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[-1, 0])
        drafts["spec_model"] = str(tmp_path / "head")
    plain, _ = run(model)
    drafted, totals = run(model, tensor_parallel_size=2, **drafts)
    assert drafted == plain and totals.draft_tokens > 60
