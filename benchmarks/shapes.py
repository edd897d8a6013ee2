"""Configurations of the models that benchmarks run with random weights in the true shapes."""

from __future__ import annotations

from typing import Any

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "eos_token_id": 151645,
    "dtype": "bfloat16",
}  # fmt: skip
LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 128001, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 100001,
    "dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "head_dim": 256,
    "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 262144, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    **_DELTA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False, "eos_token_id": 151645,
}  # fmt: skip
QWEN35_4B: dict[str, Any] = {  # the text part
    **_DELTA, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2560,
    "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 248320, "tie_word_embeddings": True, "eos_token_id": 248046,
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {  # the text part
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560,
    "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 1024, "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "eos_token_id": 1, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True,
    "tie_word_embeddings": False, "hidden_act": "silu", "swiglu_limit": 7.0, "eos_token_id": 200002,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
LLAMA32_3B: dict[str, Any] = {
    **LLAMA31_8B, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    "head_dim": 128, "tie_word_embeddings": True,
    "rope_scaling": {**LLAMA31_8B["rope_scaling"], "factor": 32.0},
}  # fmt: skip
QWEN3_4B: dict[str, Any] = {
    **QWEN3_06B, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 151645, "dtype": "bfloat16",
}  # fmt: skip
QWEN25_7B: dict[str, Any] = {
    **QWEN25_05B, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    **GEMMA3_4B, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "eos_token_id": 50256, "bos_token_id": 50256, "dtype": "float32",
}  # fmt: skip
TINY: dict[str, Any] = {  # to try a benchmark on a CPU
    **LLAMA31_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "dtype": "float32",
}  # fmt: skip
SHAPES = {"Qwen3-0.6B": QWEN3_06B, "Llama-3.1-8B": LLAMA31_8B, "tiny": TINY}


def eagle3_head(target: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of an EAGLE-3 head for a model, as those of the authors: 32,000 draft tokens."""
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
    )
    return {
        **{name: target[name] for name in kept}, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "silu",
        "rope_theta": target["rope_theta"], "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
