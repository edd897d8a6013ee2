"""GGUF files of recent families against transformers, and of all families without one of their parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from whole import load_model, logits_of

transformers = pytest.importorskip("transformers", reason="transformers makes the reference models")
from gguf_files import Q, write_gguf_of  # noqa: E402
from gguf_parts import check_without_parts  # noqa: E402
from test_families import CASES, ROWS, make_reference, reference_logits  # noqa: E402

from quire.models.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from quire.models.config.load import load_spec  # noqa: E402

torch.set_num_threads(1)
# What llama.cpp has in its code is not in a file.
CASES["gguf-llama4"] = (
    "Llama4Text",
    {**CASES["llama4"][1], "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3],
     "interleave_moe_layer_step": 2, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
)  # fmt: skip
CASES["gguf-falcon-h1"] = ("FalconH1", {**CASES["falcon-h1"][1], "mamba_norm_before_gate": False})
CASES["gguf-phimoe"] = ("Phimoe", {**CASES["phimoe"][1], "router_jitter_noise": 0.01})
CASES["gguf-ministral3"] = (
    "Ministral3",
    {"rope_parameters": {**CASES["ministral3"][1]["rope_parameters"], "mscale_all_dim": 0.7}},
)
FILES = [
    ("apertus", "apertus"),
    ("glm-dsa", "glm-moe-dsa"),
    ("falcon-h1", "gguf-falcon-h1"),
    ("falcon-h1", "falcon-h1-plain"),
    ("gemma3n", "gemma3n"),
    ("gemma4", "gemma4"),
    ("gemma4", "gemma4-moe"),
    ("granitehybrid", "granite4"),
    ("granitehybrid", "granite4-dense"),
    ("granitemoe", "granitemoe"),
    ("jamba", "jamba"),
    ("jamba", "jamba-dense"),
    ("kimi-linear", "kimi-linear"),
    ("llama4", "gguf-llama4"),
    ("minimax-m2", "minimax-m2"),
    ("mistral3", "ministral3"),
    ("mistral3", "gguf-ministral3"),
    ("mistral4", "mistral4"),
    ("nemotron_h", "nemotron-h-mlp-last"),
    ("nemotron_h_moe", "nemotron-h"),
    ("nemotron_h_moe", "nemotron-h-latent"),
    ("olmo2", "olmo3"),
    ("phi2", "phi"),
    ("phimoe", "gguf-phimoe"),
    ("qwen35", "qwen3-5"),
    ("qwen35moe", "qwen3-5-moe"),
    ("qwen3next", "qwen3-next"),
    ("stablelm", "stablelm"),
    ("stablelm", "stablelm-parallel"),
    ("deepseek2", "glm4-moe-lite"),
]


@pytest.mark.parametrize(("arch", "case"), FILES)
def test_a_file_equals_the_checkpoint(
    arch: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and the most likely tokens are those of transformers, as they are from the safetensors file."""
    model = make_reference(case, tmp_path)
    path = write_gguf_of(tmp_path, arch, model.config)
    ours = load_model(path)
    for row, logits in zip(ROWS, logits_of(ours, ROWS)):
        expected = reference_logits(model, row)
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    check_without_parts(path, monkeypatch)


WIDE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "num_key_value_heads": 1,
}
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "num_hidden_layers": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
QUANTISED = {  # architecture, class, settings, a tensor, whether it stays packed
    "whole heads": (
        "qwen35", "qwen3-5", {**HEADS, "linear_value_head_dim": 32}, "linear_attn.out_proj", True
    ),
    "half blocks": (
        "qwen35", "qwen3-5", {**HEADS, "linear_value_head_dim": 16}, "linear_attn.out_proj", False
    ),
    "one tensor for two": (
        "qwen3next", "qwen3-next", {**HEADS, **EXPERTS, "linear_value_head_dim": 32}, "linear_attn.in_proj_b", True
    ),
    "stacked halves": (
        "gemma4", "gemma4-moe", {"moe_intermediate_size": 32, "global_head_dim": 64}, "experts.3.up_proj", True
    ),
    "permuted": ("granitehybrid", "granite4", {"head_dim": None, "mamba_n_heads": 4}, "shared_mlp.gate_proj", True),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_q8_0_equals_the_rounded_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reordered, joined and halved tensors stay packed where whole blocks move; logits are those of the numbers."""
    arch, case, settings, tensor, is_packed = QUANTISED[name]
    monkeypatch.setitem(CASES, "gguf-wide-recent", (CASES[case][0], {**CASES[case][1], **WIDE, **settings}))
    config = make_reference("gguf-wide-recent", tmp_path).config
    packed = write_gguf_of(tmp_path, arch, config, Q.Q8_0)
    rounded = write_gguf_of(tmp_path, arch, config, Q.Q8_0, rounded=True)
    expected = logits_of(load_model(rounded), ROWS)[0]
    logits = logits_of(load_model(packed), ROWS)[0]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    stored = open_checkpoint(packed, load_spec(packed)).stored(f"model.layers.0.{tensor}.weight")
    assert bool(stored) == is_packed
