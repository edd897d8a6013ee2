"""Every method of speculation under every sampling parameter gives the tokens of plain decoding.

Tokens are compared one by one with those of the same requests alone and without drafts. That is stronger than a test of
distributions, which could not see a wrong token in a right proportion. Drafts are expected answers with mistakes, so
each parameter meets accepted and rejected drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from switches import MAX_LEN, Bench, defaults
from test_draft_methods import FreshBench, correct_drafts, write_demo_head

from heads import write_mtp
from quire import EngineConfig
from quire.frontend.model import tokenizer_of
from quire.frontend.processor import InputProcessor
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer
from quire.types import EngineOutput, EngineRequest, SamplingParams, StructuredOutputsParams

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.04},
    "all filters": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition_penalty": {"temperature": 0.9, "repetition_penalty": 1.3},
    "presence_penalty": {"temperature": 0.9, "presence_penalty": 1.0},
    "frequency_penalty": {"temperature": 0, "frequency_penalty": 0.8},
    "logit_bias": {"logit_bias": {7: 4.0, 9: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 7, 300]},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(0, 1600, 2))},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "n": {"n": 2, "top_p": 0.9},
}
LIST = {"type": "array", "items": {"enum": ["red", "blue", 7]}, "minItems": 6, "maxItems": 8}
OF_TEXT: dict[str, dict[str, Any]] = {  # these need a tokenizer
    "bad_words": {"temperature": 0, "bad_words": ["the", "a little", "was"]},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-f ]{30}")},
    "json": {"structured_outputs": StructuredOutputsParams(json=LIST)},
}
MODEL = "demo-draft"
TOKENS = 26


def parameter_requests(tokenizer: Tokenizer, vocab_size: int) -> list[EngineRequest]:
    """Return requests named after their parameters: `PARAMETERS`, and `OF_TEXT` if there is a tokenizer."""
    asked = PARAMETERS if isinstance(tokenizer, NoTokenizer) else PARAMETERS | OF_TEXT
    processor = InputProcessor(tokenizer, vocab_size, MAX_LEN, eos_ids=[2])
    prompts = [[300 + 7 * i, *range(40, 60), 900 - i] for i in range(len(asked))]
    params = [SamplingParams(max_tokens=TOKENS, seed=5, **given) for given in asked.values()]
    return [r for args in zip(asked, prompts, params) for r in processor.process(*args)]


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.set_num_threads(1)
    return Bench(MODEL, requests=parameter_requests(tokenizer_of(EngineConfig(model=MODEL)), 2048))


def with_each_parameter(bench: Bench, method: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    correct_drafts(bench, monkeypatch)
    engine = bench.engine({**defaults(), **method, "spec_tokens": 3, "spec_adaptive": False})
    for request in bench.requests:
        engine.add(request)
    outputs: dict[str, list[EngineOutput]] = {request.id: [] for request in bench.requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.id].append(output)
    for name, found in outputs.items():
        assert [token for output in found for token in output.token_ids] == bench.expected[name], name
        timing = found[-1].timing
        assert timing is not None and 0 < timing.accepted_tokens < timing.draft_tokens, (name, timing)
    engine.close()


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "eagle3"])
def test_every_parameter(bench: Bench, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = {"draft": "demo-draft", "eagle3": str(tmp_path / "head")}
    write_demo_head(tmp_path / "head", target=128)
    with_each_parameter(bench, {"spec_method": method, "spec_model": networks.get(method)}, monkeypatch)


def test_every_parameter_with_the_layer_for_mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    bench = FreshBench(str(write_mtp(tmp_path)), requests=parameter_requests(NoTokenizer(), 1600))
    with_each_parameter(bench, {"spec_method": "mtp"}, monkeypatch)
