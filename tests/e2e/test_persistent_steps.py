"""Decode steps as one kernel against the same steps layer by layer, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.persistent.launch import DecodeStep

pytestmark = pytest.mark.gpu
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True,
    "attention_bias": False, "num_hidden_layers": 5,
}  # fmt: skip
ROWS = 5  # more than a kernel takes at first, then fewer, as answers end
LENGTHS = [40, 90, 150, 220, 300]


def generate(config: dict[str, Any], folder: Path, **settings: Any) -> list[list[dict[int, float]]]:
    """Return the log-probabilities of each request's steps: of the chosen token and the five most probable ones."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    fixed: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True, compile_processes=0)
    with LLM(str(folder), max_num_seqs=8, **fixed, **settings) as llm:
        prompts = [{"prompt_token_ids": list(range(1, 1 + 20 * (i + 1)))} for i in range(ROWS)]
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=5)
            for length in LENGTHS
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]
        for output in outputs
    ]


@pytest.mark.parametrize(
    "config, quantization",
    [(LLAMA, "auto"), (QWEN, "auto"), (LLAMA, "fp8"), (QWEN, "fp8-block"), (LLAMA, "int4")],
    ids=["llama, own head", "qwen3, tied head", "fp8", "fp8 in blocks", "int4"],
)
def test_steps_as_one_kernel_agree_with_layers(
    config: dict[str, Any], quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    launched: list[int] = []
    launch = DecodeStep.__call__

    def recorded(step: DecodeStep, *arguments: torch.Tensor | int) -> None:
        launched.append(step.schedule.rows)
        launch(step, *arguments)

    monkeypatch.setattr(DecodeStep, "__call__", recorded)
    found = generate(config, tmp_path / "model", quantization=quantization)
    assert set(launched) == {1, 2, 4}
    launched.clear()
    expected = generate(config, tmp_path / "model", quantization=quantization, persistent_kernel=False)
    assert not launched
    for ours, theirs in zip(found, expected, strict=True):
        compared = 0
        for mine, other in zip(ours, theirs, strict=True):
            shared = mine.keys() & other.keys()
            assert max(abs(mine[token] - other[token]) for token in shared) < 0.1
            compared += 1
            if max(mine, key=mine.__getitem__) != max(other, key=other.__getitem__):
                break  # a near tie, after which the texts differ
        assert compared >= 5


def test_two_engines_with_persistent_kernels_generate_at_once(tmp_path: Path) -> None:
    """Blocks of one kernel never wait for blocks that the other's keep from running."""
    from concurrent.futures import ThreadPoolExecutor

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    settings: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True, kv_cache_memory=256 << 20)
    settings["compile_processes"] = 0
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)

    def work(llm: LLM) -> list[int]:
        return llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0].outputs[0].token_ids

    with LLM(str(folder), **settings) as first, LLM(str(folder), **settings) as second:
        alone = work(first)
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                assert [list(tokens) for tokens in pool.map(work, (first, second))] == [list(alone)] * 2
