"""A writer of GGUF files of recent families, as llama.cpp's converter would write them.

It shares no code with the reader: what the converter does is written down here a second time, by family.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_keys import Tensors, full_head_dim, metadata_of
from safetensors.torch import load_file

Q = gguf.GGMLQuantizationType
ARCHS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
PERMUTED = ("granitehybrid", "granitemoe", "mistral3")
PLUS_ONE = ("qwen3next", "qwen35", "qwen35moe")


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
    if ".act_fn." in name:
        return [(f"{block}xielu.{name.rpartition('.')[2]}", value)]
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


def xielu_keys(tensors: Tensors) -> dict[str, list[float]]:
    """Take the numbers of Apertus' activation out of the tensors, and return them as lists over layers."""
    keys: dict[str, list[float]] = {}
    for name in sorted(tensors, key=lambda name: int(name.split(".")[1]) if name.startswith("blk.") else -1):
        if ".xielu." in name:
            keys.setdefault("xielu." + name.rpartition(".")[2], []).append(float(tensors.pop(name).item()))
    return keys


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
    path: Path,
    arch: str,
    keys: dict[str, Any],
    tensors: Tensors,
    kind: Q = Q.F32,
    eos: int = 2,
    bare: dict[str, Any] | None = None,
) -> Path:
    """Write a file with these keys of the architecture; matrices of whole blocks are stored as `kind`.

    The keys of `bare` have no architecture in front.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_eos_token_id(eos)
    for key, value in keys.items():
        add_key(writer, f"{arch}.{key}", value)
    for key, value in (bare or {}).items():
        add_key(writer, key, value)
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
    bare = xielu_keys(tensors)
    tensors = {**tensors, **rope_tensors(arch, config)}
    if rounded:
        tensors = {name: as_rounded(value, kind) for name, value in tensors.items()}
    path = folder / f"{kind.name}{'-rounded' * rounded}.gguf"
    return write_file(path, arch, keys, tensors, Q.F32 if rounded else kind, bare=bare)


def fits(value: np.ndarray, kind: Q) -> bool:
    """Return whether a tensor is stored as blocks of `kind`: a matrix whose rows are whole blocks."""
    return kind != Q.F32 and value.ndim > 1 and value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


def as_rounded(value: np.ndarray, kind: Q) -> np.ndarray:
    """Return the numbers that a tensor has once it is stored as `kind`."""
    if not fits(value, kind):
        return value
    blocks = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), kind)
    return gguf.quants.dequantize(blocks, kind).reshape(value.shape)
