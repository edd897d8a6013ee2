"""A writer of GGUF files of recent families, as llama.cpp's converter would write them.

It shares no code with the reader: what the converter does is written down here a second time, by family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

Q = gguf.GGMLQuantizationType
Tensors = dict[str, np.ndarray]
ARCHS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
PERMUTED = ("granitehybrid", "granitemoe", "mistral3")
PLUS_ONE = ("qwen3next", "qwen35", "qwen35moe")


# ------------------------------------------------------------------------------------------- metadata


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


# -------------------------------------------------------------------------------------------- tensors


def tensors_of(arch: str, folder: Path, config: Any) -> Tensors:
    """Return the tensors by their GGUF names, with the changes that the converter makes."""
    names = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    out: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for changed, value in _changed(arch, name, tensor.float().numpy(), config):
            if found := re.fullmatch(
                r"(?:.*\.layers\.(\d+)\..*experts|.*(altup_\w+))\.(\d+)(?:\.(\w+))?\.weight", changed
            ):
                layer, table, number, which = found.groups()
                which = {"w1": "gate", "w2": "down", "w3": "up"}.get(
                    which or "", (which or "").removesuffix("_proj")
                )
                own = "altup_unembd_proj" if "unembed" in changed else "altup_proj"
                stack = f"{own}.weight" if table else f"blk.{layer}.ffn_{which}_exps.weight"
                stacks.setdefault(stack, {})[int(number)] = value
                continue
            theirs = changed if changed.startswith("blk.") else names.get_name(changed, (".weight", ".bias"))
            assert theirs, changed
            out[theirs] = value
    for stack, values in stacks.items():
        out[stack] = np.stack([values[number] for number in range(len(values))])
    return out


def _changed(arch: str, name: str, value: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Return the tensor's name, or its GGUF name, and its value; several if the converter splits it."""
    block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    if arch == "falcon-h1":
        value = _scaled(name, value, config)
    if arch in ("qwen35", "qwen35moe") and "linear_attn." in name:
        value = _tiled(name, value, config)
    if arch in PLUS_ONE and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    if arch in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        value = value.reshape(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    if name.endswith("conv1d.weight"):
        squeezed = value.reshape(value.shape[0], -1)
        return [(name, squeezed if arch != "kimi-linear" else squeezed[None, :, None])]
    if name.endswith("A_log"):
        value = -np.exp(value)
        return [(name, value[:, None] if arch in _WITH_MAMBA2 else value)]
    if name.endswith(("mamba.D", "mixer.D")):
        return [(name, value[:, None] if arch in _WITH_MAMBA2 else value)]
    if name.endswith("dt_bias"):
        return [(block + "ssm_dt.bias", value)]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return [(name, value.reshape(getattr(config, "mamba_n_groups", 0) or config.n_groups, -1))]
    if name.endswith("in_proj_qkvz.weight"):
        return _ungrouped(block, value, config)
    if name.endswith("kv_b_proj.weight"):
        whole = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        content = config.qk_nope_head_dim
        return [
            (block + "attn_k_b.weight", whole[:, :content].swapaxes(1, 2)),
            (block + "attn_v_b.weight", whole[:, content:]),
        ]
    if name.endswith("e_score_correction_bias"):
        return [(block + "exp_probs_b.bias", value.reshape(-1))]
    if name.endswith("router.scale"):
        return [(block + "ffn_gate_inp.scale", value)]
    if name.endswith("per_expert_scale"):
        return [(block + "ffn_down_exps.scale", value)]
    if name.endswith(("layer_scalar", "correct_output_scale")):
        return [(name + ".weight", value)]
    return _split_experts(arch, name, block, value, config)


_WITH_MAMBA2 = ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe")


def _split_experts(
    arch: str, name: str, block: str, value: np.ndarray, config: Any
) -> list[tuple[str, np.ndarray]]:
    """Return matrices that hold gate and up together as two, and stacks of experts under their GGUF names."""
    half = value.shape[-2] // 2 if value.ndim > 1 else 0
    if name.endswith("shared_mlp.input_linear.weight"):
        suffix = "_shexp" if config.num_local_experts else ""
        return [
            (f"{block}ffn_gate{suffix}.weight", value[:half]),
            (f"{block}ffn_up{suffix}.weight", value[half:]),
        ]
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return [(block + "ffn_down.weight", value)]
    if name.endswith("block_sparse_moe.input_linear.weight"):
        return [
            (block + "ffn_gate_exps.weight", value[:, :half]),
            (block + "ffn_up_exps.weight", value[:, half:]),
        ]
    if arch == "llama4" and name.endswith("gate_up_proj"):
        rows = value.swapaxes(1, 2)
        half = rows.shape[1] // 2
        return [
            (block + "ffn_gate_exps.weight", rows[:, :half]),
            (block + "ffn_up_exps.weight", rows[:, half:]),
        ]
    if arch == "llama4" and name.endswith("experts.down_proj"):
        return [(block + "ffn_down_exps.weight", value.swapaxes(1, 2))]
    if name.endswith("experts.gate_up_proj"):
        return [(block + "ffn_gate_up_exps.weight", value)]
    if name.endswith("experts.down_proj"):
        return [(block + "ffn_down_exps.weight", value)]
    return [(name, value)]


def _ungrouped(block: str, value: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Return Qwen3-Next's projections to q, k, v and z without their order by key head."""
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    wide = config.linear_num_value_heads // heads * config.linear_value_head_dim
    by_head = value.reshape(heads, -1, value.shape[1])
    q, k, v, z = (
        part.reshape(-1, value.shape[1]) for part in np.split(by_head, [dim, 2 * dim, 2 * dim + wide], 1)
    )
    return [(block + "attn_qkv.weight", np.concatenate((q, k, v))), (block + "attn_gate.weight", z)]


def _tiled(name: str, value: np.ndarray, config: Any) -> np.ndarray:
    """Return a tensor of Qwen3.5's linear attention with the first value heads of all key heads in front."""
    keys, heads, dim = (
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim,
    )  # fmt: skip

    def moved(part: np.ndarray) -> np.ndarray:
        return part.reshape(keys, heads // keys, -1, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    if name.endswith("out_proj.weight"):
        return moved(value.T).T
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = len(value) - heads * dim
        return np.concatenate((value[:before], moved(value[before:])))
    return value if name.endswith("norm.weight") else moved(value)


def _scaled(name: str, value: np.ndarray, config: Any) -> np.ndarray:
    """Return a tensor of Falcon-H1 times the model's multipliers."""
    inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = [inner, inner, shared, shared, config.mamba_n_heads]
    parts = np.repeat(config.ssm_multipliers, sizes) if name.endswith("mamba.in_proj.weight") else None
    factors = {
        "embed_tokens.weight": config.embedding_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "k_proj.weight": config.key_multiplier * config.attention_in_multiplier,
        "q_proj.weight": config.attention_in_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "self_attn.o_proj.weight": config.attention_out_multiplier,
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
    }
    factor = next((factor for end, factor in factors.items() if name.endswith(end)), 1.0)
    value = value if parts is None else value * (parts[:, None] * config.ssm_in_multiplier).astype(np.float32)
    return (value * factor).astype(np.float32)


def rope_tensors(arch: str, config: Any) -> Tensors:
    """Return the divisors of rotary frequencies that a file has as tensors."""
    if arch == "gemma4":
        dim = full_head_dim(config)
        turned = int(dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
        rest = dim // 2 - turned
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * rest, np.float32)}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return {}
    dim, base, old = config.head_dim, rope["rope_theta"], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for place in range(0, dim, 2):
        wave = 2 * math.pi * base ** (place / dim)
        smooth = (old / wave - low) / (high - low)
        middle = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wave < old / high else factor if wave > old / low else middle)
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


# ----------------------------------------------------------------------------------------------- file


def write_file(
    path: Path, arch: str, keys: dict[str, Any], tensors: Tensors, kind: Q = Q.F32, eos: int = 2
) -> Path:
    """Write a file with these keys of the architecture; matrices of whole blocks are stored as `kind`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_eos_token_id(eos)
    for key, value in keys.items():
        add_key(writer, f"{arch}.{key}", value)
    for name, value in tensors.items():
        value = np.ascontiguousarray(value, np.float32)
        if fits(value, kind):
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that the converter gives a value of this type."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_float32(key, value)


def write_gguf_of(folder: Path, arch: str, config: Any, kind: Q = Q.F32, rounded: bool = False) -> Path:
    """Convert the checkpoint in `folder`; `rounded` stores the numbers of `kind` as plain ones."""
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4
    tensors = tensors_of(arch, folder, config)
    keys = metadata_of(arch, config, tensors)
    tensors = {**tensors, **rope_tensors(arch, config)}
    if rounded:
        tensors = {name: as_rounded(value, kind) for name, value in tensors.items()}
    path = folder / f"{kind.name}{'-rounded' * rounded}.gguf"
    return write_file(path, arch, keys, tensors, Q.F32 if rounded else kind)


def fits(value: np.ndarray, kind: Q) -> bool:
    """Return whether a tensor is stored as blocks of `kind`: a matrix whose rows are whole blocks."""
    return kind != Q.F32 and value.ndim > 1 and value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


def as_rounded(value: np.ndarray, kind: Q) -> np.ndarray:
    """Return the numbers that a tensor has once it is stored as `kind`."""
    if not fits(value, kind):
        return value
    blocks = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), kind)
    return gguf.quants.dequantize(blocks, kind).reshape(value.shape)
