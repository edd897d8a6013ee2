"""Every model family against transformers: tiny random checkpoints, fp32, odd shapes, logits and tokens.

Weights have a large variance, and norms and biases are not left at 1 and 0. So a wrong scale, a missing bias or a
misplaced norm changes the logits by far more than the tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recent_cases import RECENT, RECENT_CLASSES
from whole import greedy, last_logits, load_model, logits_of, whole_batch

from quire.models.spec import ModelSpec
from quire.types import ModelError

transformers = pytest.importorskip("transformers", reason="transformers makes the reference models")
torch.set_num_threads(1)

VOCAB = 97
ROWS = [[5, 17, 3, 88, 42, 9, 61, 20, 33, 7, 2, 71, 50, 14, 96, 8, 27], [1, 60, 33, 4, 12]]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 5, "decoder_sparse_step": 1}


SIGMOID_MOE = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
GLM4_MOE = {**SIGMOID_MOE, "num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **settings}}


LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LONGROPE = {
    "original_max_position_embeddings": 4,
    **rope("longrope", partial_rotary_factor=0.5, short_factor=[1.5, 2.5], long_factor=[3.0, 9.0]),
}
LONGROPE_SHORT = rope("longrope", short_factor=[1.5, 2.5, 1.0, 2.0], long_factor=[3.0, 9.0, 3.0, 8.0])
GRANITE = {
    "head_dim": 8,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
OLMO3 = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
}  # fmt: skip
MINISTRAL3 = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=4,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.3,
)
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "truncate": False,
    },
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "num_hidden_layers": 5,
}

MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 18,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "head_dim": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
DEEP_YARN = rope("yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7)

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
}
SHARED_MOE = {**MOE, "shared_expert_intermediate_size": 40}
LFM2 = {
    "head_dim": None,
    "hidden_size": 48,
    "block_multiple_of": 8,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

NEMOTRON_H = {
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 10,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
}
GRANITE4 = {
    "head_dim": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 40,
    "num_local_experts": 5,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
FALCON_H1 = {"mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_d_state": 10, "mamba_n_groups": 2, "head_dim": 8}
JAMBA = {
    "head_dim": None,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "mamba_d_state": 5,
    "mamba_dt_rank": 7,
}
KIMI = {
    **MLA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["sparse"] * 3,
    "linear_head_dim": 8,
    "linear_num_heads": 6,
    "num_local_experts": 6,
    "n_routed_experts": None,
    "num_experts_per_tok": 2,
}
MINIMAX = {
    "head_dim": 8,
    "num_local_experts": 4,
    "block_size": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_attn_alpha_factor": 1.7,
    "full_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 1.3,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-dim-from-hidden": ("Llama", {"head_dim": None}),
    "llama-linear": ("Llama", rope("linear", factor=3.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=3.0)),
    "llama-llama3": ("Llama", LLAMA3),
    "llama-yarn": ("Llama", YARN),
    "llama-yarn-mscale": (
        "Llama",
        rope("yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.5, beta_fast=16.0, truncate=False),
    ),
    "llama-yarn-truncated": (
        "Llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                **rope("yarn", factor=4.0, original_max_position_embeddings=4096)["rope_parameters"],
                "rope_theta": 1e4,
            },
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied-yarn": ("Qwen3", {"tie_word_embeddings": True, **YARN}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True}),
    "gemma3": ("Gemma3Text", GEMMA),
    # a field of the config that transformers ignores
    "gemma3-attention-cap": ("Gemma3Text", {**GEMMA, "attn_logit_softcapping": 0.5}),
    "gemma3-linear": (
        "Gemma3Text",
        {
            **GEMMA,
            "final_logit_softcapping": 9.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "gemma3-biases": ("Gemma3Text", {**GEMMA, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 4}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "qwen3-moe-dense": (
        "Qwen3Moe",
        {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "deepseek-v2-dense": ("DeepseekV2", {**MLA, "first_k_dense_replace": 3}),
    "deepseek-v2-dense-lora": ("DeepseekV2", {**MLA, "q_lora_rank": 20, "first_k_dense_replace": 3}),
    "deepseek-v3-dense-yarn": (
        "DeepseekV3",
        {**MLA, **DEEP_YARN, "q_lora_rank": 20, "first_k_dense_replace": 3},
    ),
    "deepseek-v2": ("DeepseekV2", {**MLA, "first_k_dense_replace": 1}),
    "deepseek-v2-groups": ("DeepseekV2", {**MLA, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": (
        "DeepseekV3",
        {**MLA, **GROUPS, **DEEP_YARN, "q_lora_rank": 20, "first_k_dense_replace": 1},
    ),
    "deepseek-v3-no-groups": ("DeepseekV3", {**MLA, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek-v3-dense-halves": ("DeepseekV3", {**MLA, "rope_interleave": False, "first_k_dense_replace": 3}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 9.0}),
    "gemma2-without-caps": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "phi3": ("Phi3", {"head_dim": 8, "num_attention_heads": 6, "sliding_window": 5}),
    "phi3-partial": ("Phi3", {"head_dim": 8, **rope("default", partial_rotary_factor=0.75)}),
    "phi3-longrope": ("Phi3", {"head_dim": 8, **LONGROPE}),
    "phi3-longrope-short": (
        "Phi3",
        {
            "head_dim": 8,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 64,
            **LONGROPE_SHORT,
        },
    ),
    "olmo2": ("Olmo2", {"head_dim": 8, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-whole-heads": ("Glm4", {**rope("default", partial_rotary_factor=1.0), "attention_bias": False}),
    "granite": ("Granite", GRANITE),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-full": ("GptOss", {**GPT_OSS, "layer_types": ["full_attention"] * 3, "attention_bias": False}),
    "granite-biases": (
        "Granite",
        {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", {"head_dim": 8, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {"head_dim": 8, "no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 4},
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16}),
    "seed-oss": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "olmo3": ("Olmo3", {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 4, **OLMO3}),
    "exaone4": ("Exaone4", {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}),
    "exaone4-full": (
        "Exaone4",
        {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "hunyuan-dense": ("HunYuanDenseV1", rope("dynamic", factor=1.0, alpha=1000.0)),
    "hunyuan-dense-plain": ("HunYuanDenseV1", {"attention_bias": True}),
    "ernie4-5": ("Ernie4_5", {"use_bias": True}),
    "starcoder2": ("Starcoder2", {"head_dim": 8, "sliding_window": 5, "intermediate_size": 64}),
    "cohere": ("Cohere", {"head_dim": 8, "use_qk_norm": True, "logit_scale": 2.5}),
    "cohere-plain": (
        "Cohere",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 1.0},
    ),
    "cohere2": (
        "Cohere2",
        {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2, "logit_scale": 2.5},
    ),
    "apertus": ("Apertus", {"head_dim": 8, "hidden_act": "xielu", **LLAMA3}),
    "arcee": ("Arcee", {"hidden_act": "relu2", "mlp_bias": True}),
    "nemotron": (
        "Nemotron",
        {"hidden_act": "relu2", "mlp_bias": True, "attention_bias": True, "head_dim": 8},
    ),
    "ministral": (
        "Ministral",
        {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "ministral3": ("Ministral3", MINISTRAL3),
    "stablelm": ("StableLm", {"head_dim": 8, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"head_dim": 8, "use_parallel_residual": True}),
    "phi": ("Phi", {"head_dim": 8, "hidden_act": "gelu_new", "intermediate_size": 64}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "head_dim": 8, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-mixed": (
        "Qwen2Moe",
        {
            **MOE,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "olmoe": ("Olmoe", {**MOE, "head_dim": None, "num_attention_heads": 4}),
    "olmoe-biases": (
        "Olmoe",
        {**MOE, "head_dim": 8, "num_key_value_heads": 6, "norm_topk_prob": True, "attention_bias": True},
    ),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-groups": (
        "Glm4Moe",
        {
            **GLM4_MOE,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "dots1": (
        "Dots1",
        {**SIGMOID_MOE, "n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1},
    ),
    "dots1-window": (
        "Dots1",
        {
            **SIGMOID_MOE,
            "n_shared_experts": 1,
            "n_group": 3,
            "topk_group": 1,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 7, "num_experts_per_tok": 3, "rotary_dim": 6}),
    "qwen3-next": ("Qwen3Next", {**DELTA, **SHARED_MOE}),
    "qwen3-next-mixed": (
        "Qwen3Next",
        {
            **DELTA,
            **SHARED_MOE,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3-5": ("Qwen3_5", DELTA),
    "qwen3-5-moe": ("Qwen3_5Moe", {**DELTA, **SHARED_MOE}),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h-mlp-last": (
        "NemotronH",
        {**NEMOTRON_H, "layers_block_type": ["full_attention", "linear_attention", "mlp"], "use_bias": True},
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe"],
            "moe_latent_size": 20,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "granite4": ("GraniteMoeHybrid", GRANITE4),
    "granite4-dense": (
        "GraniteMoeHybrid",
        {**GRANITE4, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1},
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 1.4,
            "mlp_multipliers": [0.7, 1.5],
            "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
        },
    ),
    "falcon-h1-plain": ("FalconH1", FALCON_H1),
    "falcon-h1-behind": (
        "FalconH1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True},
    ),
    "jamba": ("Jamba", JAMBA),
    "jamba-dense": ("Jamba", {**JAMBA, "num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "kimi-linear": ("KimiLinear", KIMI),
    "minimax": ("MiniMax", MINIMAX),
    "lfm2": ("Lfm2", LFM2),
    "lfm2-moe": (
        "Lfm2Moe",
        {**LFM2, **MOE, "num_experts": 9, "num_dense_layers": 1, "routed_scaling_factor": 1.7},
    ),
    "lfm2-biases": (
        "Lfm2",
        {
            **LFM2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "layer_types": None,
            "full_attn_idxs": [2],
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "n_inner": 96,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2-untied": (
        "GPT2",
        {"n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 64, "tie_word_embeddings": False},
    ),
}
CASES |= RECENT
OFFSET_NORMS = ("Gemma", "Gemma2", "Gemma3Text")  # the weights of norms are stored minus one
NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe", "Qwen2Moe", "Olmoe", "MiniMaxM2")
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel", **RECENT_CLASSES}
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


def make_reference(case: str, folder: Path, **save: Any) -> Any:
    """Write the case's random checkpoint and return the transformers model that wrote it."""
    name, settings = CASES[case]
    base = {k: BASE[k] for k in ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")}
    merged = {**(base if name == "GPT2" else BASE), **settings}
    if merged.get("head_dim", 0) is None:
        del merged["head_dim"]
    config = getattr(transformers, CONFIGS.get(name, name + "Config"))(
        **{**merged, "attn_implementation": "eager"}
    )
    torch.manual_seed(7)
    model = getattr(transformers, CLASSES.get(name, name + "ForCausalLM"))(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 1.0 if key.endswith(("weight", "scale")) and name not in OFFSET_NORMS else 0.0
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
            elif "router" in key or key.endswith("gate.weight"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if key.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.3 * torch.rand_like(buffer))
    model.save_pretrained(folder, **save)
    return model


@torch.inference_mode()
def reference_logits(model: Any, row: list[int]) -> torch.Tensor:
    return model(torch.tensor([row]), use_cache=False).logits[0]


@torch.inference_mode()
def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def check(model: Any, folder: Path, count: int = 12) -> None:
    ours = load_model(folder)
    for row, logits in zip(ROWS, logits_of(ours, ROWS)):
        expected = reference_logits(model, row)
        assert expected.std() > 0.5, "the reference's logits are degenerate"
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        alone = logits_of(ours, [row])[0]
        # oneDNN adds a bias to few rows and to many in different orders, and experts get few rows. PyTorch computes
        # exponentials at the end of a tensor, which does not fill a vector, by other instructions.
        slack = 1e-6 if model.config.model_type == "gpt_oss" or any(ours.spec.mixes) else 0.0
        assert (logits - alone).abs().max() <= slack * expected.abs().max(), (
            "a row's logits depend on the rest of the batch"
        )
    for logits, last in zip(logits_of(ours, ROWS), last_logits(ours, ROWS)):
        assert torch.allclose(logits[-1], last, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    assert greedy(ours, ROWS[0], count) == reference_greedy(model, ROWS[0], count)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    check(make_reference(case, tmp_path), tmp_path)


@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "gpt2", "deepseek-v3"])
def test_sharded(case: str, tmp_path: Path) -> None:
    model = make_reference(case, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(model, tmp_path, count=2)


def test_old_spellings_of_config(tmp_path: Path) -> None:
    """Configs as transformers 4 wrote them give the same model."""
    model = make_reference("llama-llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(model, tmp_path, count=2)


def test_latents_are_expanded_by_quantised_weights(tmp_path: Path) -> None:
    """Absorbed weights are used in the model's dtype, whatever format they are stored in."""
    from safetensors.torch import load_file, save_file

    model = make_reference("deepseek-v3-dense-yarn", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scale.repeat(2, 1)  # of two blocks: 144 rows of 18 numbers
        model.get_parameter(name).data.copy_(tensors[name].float() * scale)
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    packed = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": packed}))
    check(model, tmp_path, count=2)


def test_layers_for_drafts_are_not_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_reference("deepseek-v3", tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {
        "model.layers.3.eh_proj.weight": torch.ones(48, 96),
        "model.layers.3.enorm.weight": torch.ones(48),
    }
    save_file({**load_file(file), **extra}, file)
    check(model, tmp_path, count=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"layers\.3\.eh_proj"):
        load_model(tmp_path)


def test_keys_of_layers_that_read_others_are_not_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_reference("gemma3n", tmp_path)
    file = tmp_path / "model.safetensors"
    unused = {"k_proj.weight": torch.ones(16, 48), "k_norm.weight": torch.ones(8)}
    extra = {f"model.layers.4.self_attn.{name}": tensor for name, tensor in unused.items()}
    save_file({**load_file(file), **extra}, file)
    check(model, tmp_path, count=1)


def test_gpt2_without_prefix(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_reference("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, file)
    check(model, tmp_path, count=2)


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    model = make_reference("qwen3", tmp_path)
    logits = logits_of(load_model(tmp_path, torch.bfloat16), ROWS)[0]
    expected = reference_logits(model, ROWS[0])
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_gemma3_inside_a_multimodal_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_reference("gemma3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["vision_tower.vision_model.embeddings.patch_embedding.bias"] = torch.ones(3)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": config.pop("dtype"),
        "text_config": config,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    check(model, tmp_path, count=2)


@pytest.mark.parametrize(
    ("case", "outer", "prefix"),
    [
        ("llama4", "Llama4ForConditionalGeneration", "language_model."),
        ("gemma4", "Gemma4ForConditionalGeneration", "model.language_model."),
        ("gemma3n", "Gemma3nForConditionalGeneration", "model.language_model."),
        ("deepseek-v3", "KimiK25ForConditionalGeneration", "language_model."),
        ("mistral4", "Mistral3ForConditionalGeneration", "language_model."),
        ("qwen3-moe", "Qwen3VLMoeForConditionalGeneration", "model.language_model."),
    ],
)
def test_text_parts_of_recent_multimodal_checkpoints(
    case: str, outer: str, prefix: str, tmp_path: Path
) -> None:
    """Tensors for images and sound are not read, whatever the checkpoint calls the text part."""
    from safetensors.torch import load_file, save_file

    model = make_reference(case, tmp_path)
    file, inner = tmp_path / "model.safetensors", "model." if prefix.startswith("model.") else ""
    tensors = {
        name if inner and name.startswith("lm_head") else prefix + name.removeprefix(inner): tensor
        for name, tensor in load_file(file).items()
    }
    unread = ("vision_tower.x.weight", "model.audio_tower.x.weight", "multi_modal_projector.x.weight")
    save_file({**tensors, **{name: torch.ones(3) for name in unread}}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    wrapped = {"architectures": [outer], "model_type": "outer", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    expected = reference_logits(model, ROWS[1])
    (logits,) = logits_of(load_model(tmp_path), [ROWS[1]])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
MROPE = rope("default", mrope_section=[1, 1, 2])
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", **VISION},
    ),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", **MINISTRAL3},
        {"model_type": "pixtral", **VISION},
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", {"head_dim": None, **MROPE}, BLOCKS),
    "qwen3-vl": ("Qwen3VL", {"head_dim": 8, **MROPE}, {**BLOCKS, "deepstack_visual_indexes": [0]}),
    "llava": ("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **VISION}),
}


@pytest.mark.parametrize("case", MULTIMODAL)
def test_text_parts_of_multimodal_checkpoints(case: str, tmp_path: Path) -> None:
    """Vision weights are not read; positions of text are the same in all parts of a rotary embedding."""
    name, text, vision = MULTIMODAL[case]
    text = {
        key: value for key, value in {**BASE, **text}.items() if value is not None or key == "sliding_window"
    }
    config = getattr(transformers, name + "Config")(text_config=text, vision_config=vision)
    torch.manual_seed(7)
    model = getattr(transformers, name + "ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    expected = reference_logits(model, ROWS[1])
    (logits,) = logits_of(load_model(tmp_path), [ROWS[1]])
    assert expected.std() > 0.3 and (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published: blocks of 32 numbers of four bits, two in a byte, with a power of two as their scale."""
    from safetensors.torch import load_file, save_file

    sizes = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    monkeypatch.setitem(CASES, "gpt-oss-mxfp4", ("GptOss", sizes))
    model = make_reference("gpt-oss-mxfp4", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        numbers = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1).flatten(-2)
        numbers = (numbers * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
        with torch.no_grad():
            parameter.copy_(numbers.transpose(1, 2))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(model, tmp_path, count=2)


def test_float16_runs(tmp_path: Path) -> None:
    model = make_reference("llama", tmp_path)
    logits = logits_of(load_model(tmp_path, torch.float16), ROWS)[0]
    expected = reference_logits(model, ROWS[0])
    assert (logits.float() - expected).abs().mean() < 0.01 * expected.abs().mean()


@pytest.mark.parametrize("name", [*NAMES, "Glm4Moe", "Gemma3Text", "GPT2", "DeepseekV3"])
@pytest.mark.parametrize("tied", [True, False])
def test_models_without_a_head(tmp_path: Path, name: str, tied: bool) -> None:
    """Checkpoints saved from the base class have other tensor names and no lm_head; hidden states are compared."""
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")
    base = {key: BASE[key] for key in keys} | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    settings = {**(base if name == "GPT2" else BASE), "tie_word_embeddings": tied}
    settings |= {"Gemma3Text": GEMMA, "Olmoe": {"head_dim": 8}, "Glm4Moe": GLM4_MOE}.get(name, {})
    if name == "DeepseekV3":
        settings |= {**MLA, **GROUPS}
        del settings["head_dim"]
    config = getattr(transformers, name + "Config")(**settings)
    torch.manual_seed(3)
    model = getattr(transformers, name + "Model")(config).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [name + "Model"]
    ours = load_model(tmp_path)
    assert ours.spec.has_head == tied
    with torch.inference_mode():
        found = ours(whole_batch(ROWS))
        expected = torch.cat([model(torch.tensor([row])).last_hidden_state[0] for row in ROWS])
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


# The spec's defaults for fields that a config.json omits, by the name of the field in transformers.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": lambda s: s.norm_eps,
    "layer_norm_epsilon": lambda s: s.norm_eps,
    "num_key_value_heads": lambda s: s.num_kv_heads,
    "tie_word_embeddings": lambda s: s.tie_embeddings,
    "sliding_window": lambda s: next(iter(set(s.windows) - {None}), None),
    "attention_bias": lambda s: s.o_bias,
    "mlp_bias": lambda s: s.mlp_bias,
    "num_local_experts": lambda s: s.moe.routing.num_experts,
    "num_experts_per_tok": lambda s: s.moe.routing.top_k,
    "moe_intermediate_size": lambda s: s.moe.intermediate_size,
    "norm_topk_prob": lambda s: s.moe.routing.renormalise,
    "final_logit_softcapping": lambda s: s.final_soft_cap,
    "query_pre_attn_scalar": lambda s: round(s.query_scale**-2),
}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions",
)  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, "Gemma3Text", "GPT2"])
def test_what_a_config_leaves_out_is_the_default_of_transformers(name: str) -> None:
    config = getattr(transformers, name + "Config")()
    theirs = config.to_dict()
    theirs["sliding_window"] = theirs.get("sliding_window") or None  # Qwen2-MoE writes 0 for none
    sizes = {
        key: getattr(config, key)
        for key in SIZES
        if key in theirs or (name == "GPT2" and key.startswith("n_"))
    }
    spec = ModelSpec.from_config({"architectures": [CLASSES.get(name, name + "ForCausalLM")], **sizes})
    compared = {key: (found(spec), theirs[key]) for key, found in DEFAULTS.items() if key in theirs}
    assert len(compared) >= 2 and {key: pair for key, pair in compared.items() if pair[0] != pair[1]} == {}
    head_dim = theirs.get("head_dim") or config.hidden_size // config.num_attention_heads
    assert spec.head_dim == head_dim
    kind = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    activation = theirs.get("hidden_activation") or theirs.get("hidden_act") or theirs["activation_function"]
    assert spec.activation == kind.get(activation, activation)
    if name == "GPT2":
        assert spec.intermediate_size == 4 * config.n_embd
        return
    rope = theirs["rope_parameters"]
    assert spec.rope and spec.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    if name == "Gemma3Text":
        assert spec.local_rope and spec.local_rope.theta == rope["sliding_attention"]["rope_theta"]
        assert [window is None for window in spec.windows] == [
            k == "full_attention" for k in config.layer_types
        ]
