"""Captured steps on a CPU: which steps and models are captured, and how the C kernels are built."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from threading import Thread

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.cpu import build, compiled_kernels
from quire.kernels.cpu.ops import CpuKernels
from quire.worker.launch.cpu_replay import CpuReplay
from tiny import write_tiny

needs_kernels = pytest.mark.skipif(compiled_kernels() is None, reason="no C compiler")
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
LONG = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def launcher_of(llm: LLM) -> object:
    return llm.client.engine.executor.runner.launcher  # type: ignore[attr-defined]


def answers(llm: LLM, params: SamplingParams = LONG) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@needs_kernels
def test_replayed_steps_choose_the_same_tokens(tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path / "tiny"))
    settings = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(model, **settings) as replaying, LLM(model, **settings, cpu_kernels=False) as plain:
        for params in (LONG, SamplingParams(max_tokens=20, temperature=1.0, seed=3, repetition_penalty=1.3)):
            assert answers(replaying, params) == answers(plain, params)
        launcher = launcher_of(replaying)
        assert isinstance(launcher, CpuReplay)
        assert 3 in launcher.captured and launcher.can_capture
        assert not isinstance(launcher_of(plain), CpuReplay)


@needs_kernels
def test_a_replay_makes_the_calls_again(tmp_path: Path) -> None:
    """The captured calls are what runs: without them the logits stay the same."""
    with LLM(
        str(write_tiny(tmp_path / "tiny")), dtype="float32", skip_tokenizer_init=True, device="cpu"
    ) as llm:
        answers(llm)
        launcher = launcher_of(llm)
        assert isinstance(launcher, CpuReplay)
        right = answers(llm)
        launcher.captured[3].replay = lambda: None
        assert answers(llm) != right


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 97, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64, "max_position_embeddings": 64,
    "eos_token_id": 1, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
QWEN2_MOE = QWEN3_MOE | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "shared_expert_intermediate_size": 96,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "num_local_experts": 4,
    "num_experts_per_tok": 2, "intermediate_size": 48, "max_position_embeddings": 64, "eos_token_id": 1,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32,
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(
    ("config", "quantization"),
    [(QWEN3_MOE, "auto"), (QWEN3_MOE, "int8"), (QWEN3_MOE, "int4"), (QWEN2_MOE, "auto"), (GPT_OSS, "auto")],
)
def test_models_with_experts_are_captured(
    config: dict[str, object], quantization: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **settings, quantization=quantization) as llm:
        found, launcher = answers(llm), launcher_of(llm)
        assert isinstance(launcher, CpuReplay)
        assert 3 in launcher.captured and launcher.can_capture
        assert found == answers(llm)
    if quantization == "auto":
        with LLM(str(tmp_path), **settings, cpu_kernels=False) as plain:
            assert answers(plain) == found


@needs_kernels
def test_a_model_that_computes_in_torch_is_not_captured(tmp_path: Path) -> None:
    """GPT-2 uses the reference attention."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "vocab_size": 97, "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **settings) as llm, LLM(str(tmp_path), **settings, cpu_kernels=False) as plain:
        assert answers(llm) == answers(plain)
        launcher = launcher_of(llm)
        assert isinstance(launcher, CpuReplay) and not launcher.can_capture and not launcher.captured


@needs_kernels
def test_recording_is_of_one_thread() -> None:
    kernels = compiled_kernels()
    assert isinstance(kernels, CpuKernels)
    x, weight = torch.randn(2, 32), torch.ones(32)

    def work() -> torch.Tensor:
        other = Thread(target=lambda: kernels.rms_norm(torch.zeros(5, 32), weight, 1e-6))
        other.start()
        other.join()
        return kernels.rms_norm(x, weight, 1e-6)

    y, again = kernels.capture(work)
    wanted = y.clone()
    y.zero_()
    again()
    assert torch.equal(y, wanted)


# ------------------------------------------------------------------------------------- how they are built


def test_without_a_compiler_torch_does_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert build.open_library() is None
    assert "no C compiler" in caplog.text
    monkeypatch.setattr("quire.kernels.cpu.compiled_kernels", lambda: None)
    with LLM(
        str(write_tiny(tmp_path / "tiny")), dtype="float32", skip_tokenizer_init=True, device="cpu"
    ) as llm:
        assert all(len(tokens) == 20 for tokens in answers(llm))


@needs_kernels
def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ["-no-such-flag"])
    with caplog.at_level(logging.WARNING):
        assert build.open_library() is None
    assert "the C compiler failed" in caplog.text and "no-such-flag" in caplog.text
    assert not list(tmp_path.rglob("*.so")), "a half-built file was left"


@needs_kernels
def test_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first = build._compiled()
    assert first.parent == tmp_path / ".cache" / "quire" and first.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("built again"))
    assert build._compiled() == first


@needs_kernels
def test_a_home_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FOLDERS", (build._FOLDERS[0], str(tmp_path / "other")))
    assert build._compiled().parent == tmp_path / "other"


@needs_kernels
def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(build, "_FOLDERS", (str(tmp_path / "open"),))
    with pytest.raises(OSError, match="cannot write to any of"):
        build._compiled()
    assert not list((tmp_path / "open").iterdir())
