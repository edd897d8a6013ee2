"""Draft heads: their drafts are those of a sequential twin in plain PyTorch, and change no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heads import eagle3_drafts, write_eagle3
from safetensors.torch import load_file

from quire import EngineConfig
from quire.host import build_engine
from quire.models.heads import base
from quire.speculation.features import FeatureDrafter
from quire.types import ConfigError, EngineRequest, SamplingParams
from tiny import write_tiny

TAPS = {"eagle_aux_hidden_state_layer_ids": [-1, 0]}  # the tiny model has two layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "eagle3"
    write_eagle3(folder, **TAPS)
    return folder


def requests(greedy: bool = True) -> list[EngineRequest]:
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, max_tokens=24, ignore_eos=True),
    ]
    prompts = [[1 + (7 * i + j * j) % 200 for j in range(3 + 11 * i)] for i in range(4)]
    return [
        EngineRequest(f"r{i}", prompt, params[0 if greedy else i % 2], seed=i)
        for i, prompt in enumerate(prompts)
    ]


def run(model: Path, **settings: Any) -> tuple[dict[str, list[int]], Any]:
    """Return the tokens of all requests, and the engine's counters."""
    fixed: dict[str, Any] = {
        "max_model_len": 96,
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    config = EngineConfig(model=str(model), check_invariants=True, **{**fixed, **settings})
    engine, _ = build_engine(config)
    got: dict[str, list[int]] = {}
    try:
        for request in requests(settings.get("temperature", 0) == 0):
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                got.setdefault(output.id, []).extend(output.token_ids)
        return got, engine.log.totals
    finally:
        engine.close()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "cpu_kernels": False},
    {"max_num_batched_tokens": 8, "block_size": 4, "max_num_seqs": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["usual", "plain torch", "chunks"])
def test_eagle3_changes_no_output(model: Path, eagle3: Path, settings: dict[str, Any]) -> None:
    plain, _ = run(model, **settings)
    drafts = {"spec_method": "eagle3", "spec_model": str(eagle3), "spec_tokens": 3, "spec_adaptive": False}
    drafted, totals = run(model, **settings, **drafts)
    assert drafted == plain
    assert totals.draft_tokens > 60


class Recorder:
    """The model's hidden states by position, and the drafts of a single request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.features: dict[int, torch.Tensor] = {}
        self.drafts: list[tuple[list[int], list[int]]] = []  # known tokens, drafts behind them
        learn, propose = FeatureDrafter.learn, FeatureDrafter.propose

        def keep(drafter: FeatureDrafter, batch: Any, hidden: torch.Tensor) -> None:
            states = drafter._head._features() if hasattr(drafter._head, "_features") else hidden
            for position, state in zip(batch.positions.tolist(), states):
                self.features[position] = state.clone()
            learn(drafter, batch, hidden)

        def note(drafter: FeatureDrafter, rows: Any) -> None:
            propose(drafter, rows)
            slot, count = int(rows.slots[0]), int(rows.counts[0])
            known = int(drafter._columns.num_tokens[slot])
            tokens = drafter._columns.tokens[slot].tolist()
            self.drafts.append((tokens[:known], tokens[known : known + count]))

        monkeypatch.setattr(FeatureDrafter, "learn", keep)
        monkeypatch.setattr(FeatureDrafter, "propose", note)

    def states(self, count: int) -> torch.Tensor:
        return torch.stack([self.features[position] for position in range(count)])


@pytest.mark.parametrize("chunk", [None, 8], ids=["whole prompt", "chunks"])
def test_eagle3_drafts_what_its_twin_does(
    model: Path, eagle3: Path, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr("test_draft_heads.requests", lambda greedy: requests_of_one())
    run(
        model, spec_method="eagle3", spec_model=str(eagle3), spec_tokens=3, spec_adaptive=False,
        max_num_batched_tokens=chunk, overlap=False, cpu_kernels=False,
    )  # fmt: skip
    head, embed = load_file(eagle3 / "model.safetensors"), load_file(model / "model.safetensors")
    for known, drafts in recorder.drafts[:6]:
        features = recorder.states(len(known) - 1)
        assert drafts == eagle3_drafts(head, embed["model.embed_tokens.weight"], known, features, len(drafts))
    assert len(recorder.drafts) >= 6


def requests_of_one() -> list[EngineRequest]:
    prompt = [1 + (j * j) % 200 for j in range(19)]
    return [EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "needs a spec_model of the architecture LlamaForCausalLMEagle3"),
        ({"vocab_size": 300}, "trained for a vocabulary of 300 tokens, but the model has 260"),
        ({"target_hidden_size": 64}, "reads hidden states of 64 numbers, but the model has 32"),
        ({"eagle_aux_hidden_state_layer_ids": [5]}, r"in front of the layers \[6\], but the model has only 2"),
    ],
)  # fmt: skip
def test_a_head_for_another_model_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_eagle3(tmp_path / "head", **{**TAPS, **changes})
    with pytest.raises(ConfigError, match=message):
        run(model, spec_method="eagle3", spec_model=str(tmp_path / "head"))


def test_a_model_without_the_layer_refuses_mtp(model: Path) -> None:
    with pytest.raises(ConfigError, match="spec_method mtp needs a layer for multi-token prediction"):
        run(model, spec_method="mtp")


def test_models_of_other_kinds_refuse_heads() -> None:
    class Other:
        spec = type("Spec", (), {"architecture": "GPT2LMHeadModel"})()

    with pytest.raises(ConfigError, match="GPT2LMHeadModel is another model"):
        base.decoder_of(Other(), "mtp")  # type: ignore[arg-type]
