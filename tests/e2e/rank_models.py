"""Tiny models of several kinds for tests over ranks: random weights large enough that answers differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.checkpoint.checkpoint import DummyCheckpoint

_BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 259, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "eos_token_id": 257, "bos_token_id": 256, "dtype": "float32",
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_KINDS = ["linear_attention", "linear_attention", "full_attention"] * 2
CONFIGS: dict[str, dict[str, Any]] = {
    "moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EXPERTS},
    # Four layers with a window to each without, in two groups of a shared pool of blocks.
    "windows": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 24,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2, "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
    },
    "states": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5, "conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention"] * 2, "head_dim": 8,
        "tie_word_embeddings": True,
    },
    # Linear attention, attention with a gate, and experts of which one is shared.
    "hybrid": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "layer_types": _KINDS, **_EXPERTS,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.25,
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
}  # fmt: skip


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Write the config of a model, to be loaded with `load_format="dummy"`, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_BASE, **CONFIGS[name], **changes}))
    return folder


@pytest.fixture
def loud_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dummy weights be so large that a model of few dimensions gives answers of many different tokens."""
    monkeypatch.setattr(DummyCheckpoint, "STD", 0.3)
