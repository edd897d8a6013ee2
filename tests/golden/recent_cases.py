"""Cases of test_families.py for models of 2025 and 2026, without recurrent states: class, and settings of the config."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}  # fmt: skip
LLAMA4 = {
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 1, 0],
    "floor_scale": 4,
    "attn_scale": 0.5,
    "num_local_experts": 4,
    "moe_layers": [1],
    "intermediate_size_mlp": 40,
}
SHARING = {  # of keys and values, by the last three of six layers
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 64,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
}
GEMMA4_MOE = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
    "final_logit_softcapping": 9.0,
}
GEMMA3N = {
    "head_dim": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
    "laurel_rank": 6,
    "vocab_size_per_layer_input": 90,
    "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.0, 0.0],
    "intermediate_size": [64, 64, 48, 48, 48, 48],
}

MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 18,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "head_dim": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
MISTRAL4_ROPE = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 6,
    "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
INDEX = {"index_topk": 5, "index_head_dim": 12, "index_n_heads": 9}

RECENT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("Llama4Text", {**LLAMA4, **LLAMA3}),
    "llama4-plain": (
        "Llama4Text",
        {
            **LLAMA4,
            "attention_chunk_size": 5,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "moe_layers": None,
            "attention_bias": True,
        },
    ),
    "gemma4": ("Gemma4Text", {**SHARING, "global_head_dim": 16, "use_double_wide_mlp": True}),
    "gemma4-moe": ("Gemma4Text", {**SHARING, **GEMMA4_MOE}),
    "gemma3n": ("Gemma3nText", {**SHARING, **GEMMA3N}),
    "deepseek-v32": ("DeepseekV32", {**MLA, **INDEX, "first_k_dense_replace": 1}),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {**MLA, **INDEX, "index_head_dim": 8, "indexer_types": ["full", "shared", "full"]},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", MLA),
    "mistral4": ("Mistral4", {**MLA, "rope_parameters": MISTRAL4_ROPE, "first_k_dense_replace": 1}),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {"head_dim": 8, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24},
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2}),
    "phimoe": (
        "Phimoe",
        {"head_dim": 8, "num_local_experts": 5, "router_jitter_noise": 0.3, "lm_head_bias": True},
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "head_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
}
# Classes whose name is not that of the config and ForCausalLM.
RECENT_CLASSES = {
    "Llama4Text": "Llama4ForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Gemma3nText": "Gemma3nForCausalLM",
}
# Cases beside the first of each class whose schedules are tested.
RECENT_SPECIAL = ["llama4-plain", "gemma4-moe"]
