"""The metadata of GGUF files of recent families, as llama.cpp's converter would write it: `metadata_of`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Tensors = dict[str, np.ndarray]


def metadata_of(arch: str, config: Any, tensors: Tensors) -> dict[str, Any]:
    """Return the keys of a file without the name of the architecture in front."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.freq_base": rope.get("rope_theta"),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        if value := getattr(config, name, None):
            plain = arch in ("phi2", "stablelm", "phimoe")
            keys["attention.layer_norm_epsilon" if plain else "attention.layer_norm_rms_epsilon"] = value
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        keys["expert_count"] = getattr(config, name, None) or keys.get("expert_count")
    if part := rope.get("partial_rotary_factor"):
        keys["rope.dimension_count"] = int(dim * part)
    if rope.get("rope_type") == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    keys |= METADATA.get(arch, lambda config, tensors: {})(config, tensors)
    return {key: value for key, value in keys.items() if value is not None}


def _delta(config: Any, tensors: Tensors) -> dict[str, Any]:
    heads = config.linear_num_value_heads
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config.linear_value_head_dim * heads,
        "full_attention_interval": 2,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }


def _nemotron_h(config: Any, tensors: Tensors) -> dict[str, Any]:
    kinds, moe = config.layers_block_type, "moe" in config.layers_block_type
    width = config.moe_intermediate_size if moe else config.intermediate_size
    keys = {
        "attention.head_count_kv": [config.num_key_value_heads * (k == "full_attention") for k in kinds],
        "feed_forward_length": [width * (kind in ("moe", "mlp")) for kind in kinds],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if not moe:
        return {**keys, "expert_count": None, "expert_used_count": None}
    return keys | {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "moe_latent_size": config.moe_latent_size,
    }


def _granite(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _granite_hybrid(config: Any, tensors: Tensors) -> dict[str, Any]:
    dense = not config.num_local_experts
    attends = [kind == "full_attention" for kind in config.layer_types]
    return {
        **_granite(config, tensors),
        **_mamba2(config),
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "feed_forward_length": config.shared_intermediate_size if dense else config.intermediate_size,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "attention.head_count_kv": [config.num_key_value_heads * each for each in attends],
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }


def _mamba2(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _falcon_h1(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {**_mamba2(config), "ssm.inner_size": config.mamba_d_ssm}


def _jamba(config: Any, tensors: Tensors) -> dict[str, Any]:
    period, offset = config.attn_layer_period, config.attn_layer_offset
    attends = [i % period == offset for i in range(config.num_hidden_layers)]
    return {
        "attention.head_count_kv": [config.num_key_value_heads * each for each in attends],
        "attention.key_length": None,
        "attention.value_length": None,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_dt_rank,
        "rope.freq_base": None,
    }


def _latent(config: Any, tensors: Tensors) -> dict[str, Any]:
    rotary, rank = config.qk_rope_head_dim, config.kv_lora_rank
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotary,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotary,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob or None,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", None),
    }


def _glm_lite(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {**_latent(config, tensors), "leading_dense_block_count": 1, "expert_gating_func": 2}


def _glm_dsa(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {
        **_glm_lite(config, tensors),
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
    }


def _kimi(config: Any, tensors: Tensors) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in config.layer_types]
    return {
        **_latent(config, tensors),
        "attention.head_count_kv": [int(each) for each in attends],
        "attention.value_length": None,
        "expert_weights_norm": None,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "leading_dense_block_count": 0,
    }


def _mistral3(config: Any, tensors: Tensors) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.dimension_count": config.head_dim,
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _mistral4(config: Any, tensors: Tensors) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        **_latent(config, tensors),
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _windows(config: Any) -> dict[str, Any]:
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    return {"attention.sliding_window_pattern": pattern, "rope.freq_base_swa": local}


def _olmo3(config: Any, tensors: Tensors) -> dict[str, Any]:
    return _windows(config)


def _gemma3n(config: Any, tensors: Tensors) -> dict[str, Any]:
    normal = torch.distributions.normal.Normal(0, 1)
    sparsity = [float(normal.icdf(torch.tensor(share))) for share in config.activation_sparsity_pattern]
    return {
        **_windows(config),
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "activation_sparsity_scale": sparsity,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _gemma4(config: Any, tensors: Tensors) -> dict[str, Any]:
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    own = config.to_dict()["per_layer_config"]  # of layers without a window
    full_dim, heads = full_head_dim(config), config.num_key_value_heads
    keys: dict[str, Any] = {
        **_windows(config),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": config.head_dim,
        "final_logit_softcapping": config.final_logit_softcapping,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_used_count": config.top_k_experts,
    }
    if config.use_double_wide_mlp:
        width = config.intermediate_size
        keys["feed_forward_length"] = [width * (1 + (i >= layers - shared)) for i in range(layers)]
    counts = [own.get(str(i), {}).get("num_key_value_heads", heads) for i in range(layers)]
    if set(counts) != {heads}:
        keys["attention.head_count_kv"] = counts
    return keys


def full_head_dim(config: Any) -> int:
    """Return the head size of Gemma 4's layers without a window."""
    return max(each["head_dim"] for each in config.to_dict()["per_layer_config"].values())


def _llama4(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "rope.dimension_count": config.head_dim,
    }


def _minimax_m2(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config.intermediate_size,
        "rope.dimension_count": config.rotary_dim,
        "expert_gating_func": 2,
    }


def _stablelm(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {"use_parallel_residual": config.use_parallel_residual}


def _phi2(config: Any, tensors: Tensors) -> dict[str, Any]:
    return {"attention.key_length": None, "attention.value_length": None}


METADATA: dict[str, Callable[[Any, Tensors], dict[str, Any]]] = {
    "deepseek2": _glm_lite,
    "glm-dsa": _glm_dsa,
    "falcon-h1": _falcon_h1,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "granitehybrid": _granite_hybrid,
    "granitemoe": _granite,
    "jamba": _jamba,
    "kimi-linear": _kimi,
    "llama4": _llama4,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "mistral4": _mistral4,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "olmo2": _olmo3,
    "phi2": _phi2,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "qwen3next": _delta,
    "stablelm": _stablelm,
}
