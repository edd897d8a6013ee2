"""Checkpoints as they are published in AWQ, GPTQ, compressed-tensors, ModelOpt and FP8, on a GPU against a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantised_on_gpu import CONFIG, check_checkpoint, write_model

from stored_formats import Size, Tensors, awq, compressed, fp4, fp8, gptq, pack_quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
Maker = Callable[[Size, int], tuple[Tensors, torch.Tensor]]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
PACK, DYNAMIC = compressed("pack-quantized"), {"num_bits": 8, "dynamic": True, "strategy": "token"}


def row_scales(size: Size, seed: int) -> torch.Tensor:
    return torch.rand(size[0], 1, generator=torch.Generator().manual_seed(seed)).bfloat16() + 0.5


# dtype of the model, settings of the format, and what makes a layer of a size
CASES: dict[str, tuple[str, dict[str, Any], Maker]] = {
    "gptq": ("float16", GPTQ, lambda size, seed: gptq(4, 128, seed=seed, size=size)),
    "gptq, groups of 32": ("bfloat16", GPTQ | {"group_size": 32}, lambda size, seed: gptq(4, 32, seed=seed, size=size)),
    "gptq, symmetric": ("bfloat16", GPTQ | {"sym": True}, lambda size, seed: gptq(4, 128, symmetric=True, seed=seed, size=size)),
    "gptq, act-order": ("float16", GPTQ | {"desc_act": True}, lambda size, seed: gptq(4, 128, act_order=True, seed=seed, size=size)),
    "gptq, 8 bits": ("bfloat16", GPTQ | {"bits": 8}, lambda size, seed: gptq(8, 128, seed=seed, size=size)),
    "awq": ("float16", AWQ, lambda size, seed: awq(128, seed, size)),
    "awq, groups of 64": ("bfloat16", AWQ | {"group_size": 64}, lambda size, seed: awq(64, seed, size)),
    "pack, symmetric": ("bfloat16", PACK, lambda size, seed: pack_quantized(4, 128, True, seed=seed, size=size)),
    "pack, zeros": ("bfloat16", PACK, lambda size, seed: pack_quantized(4, 128, False, seed=seed, size=size)),
    "pack, 8 bits by row": ("bfloat16", PACK, lambda size, seed: pack_quantized(8, size[1], True, seed=seed, size=size)),
    "fp8 by tensor": ("bfloat16", {"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda size, seed: fp8(torch.tensor(1.0 + seed / 50), seed=seed, size=size)),
    "fp8 by row": ("bfloat16", compressed("float-quantized", DYNAMIC), lambda size, seed: fp8(row_scales(size, seed), seed=seed, size=size)),
    "mxfp4": ("bfloat16", compressed("mxfp4-pack-quantized"), lambda size, seed: fp4(False, seed=seed, size=size)),
    "nvfp4": ("bfloat16", compressed("nvfp4-pack-quantized"), lambda size, seed: fp4(True, seed=seed, size=size)),
    "nvfp4 of modelopt": ("bfloat16", {"quant_algo": "NVFP4"}, lambda size, seed: fp4(True, modelopt=True, seed=seed, size=size)),
}  # fmt: skip


def scaled(tensors: Tensors, values: torch.Tensor) -> Tensors:
    """Return the tensors with scales that make the numbers as large as those of a model."""
    factor = float(values.shape[1] ** -0.5 / values.std())
    tensors = dict(tensors)
    for name, scale in tensors.items():
        if (
            name == "weight_scale" and scale.dtype == torch.uint8
        ):  # exponents: alike, for a few large ones hide the rest
            tensors[name] = scale % 2 + 126 - round(values.shape[1] ** 0.5).bit_length()
        elif name == "weight_global_scale":  # divides
            tensors[name] = scale / factor
        elif name in ("scales", "weight_scale_2") or (
            name == "weight_scale" and scale.dtype != torch.float8_e4m3fn
        ):
            tensors[name] = (scale * factor).to(scale.dtype)
    return tensors


def write_stored(folder: Path, dtype: str, settings: dict[str, Any], make: Maker) -> Path:
    """Write a small model whose layers, without the head, are in a format."""
    write_model(folder, CONFIG)
    stored: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            layer = scaled(*make((tensor.shape[0], tensor.shape[1]), len(stored) % 7))
            stored |= {
                name.removesuffix("weight") + part: value.contiguous() for part, value in layer.items()
            }
        else:
            stored[name] = tensor.to(getattr(torch, dtype))
    save_file(stored, folder / "model.safetensors")
    config = CONFIG | {"dtype": dtype, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("case", CASES)
def test_a_published_format_computes_what_it_does_on_a_cpu(case: str, rows: int, tmp_path: Path) -> None:
    check_checkpoint(write_stored(tmp_path, *CASES[case]), rows)


def random_blocks(rows: int, inputs: int, kind: Any, seed: int) -> Any:
    """Return random blocks of a K-quant or of MXFP4, [rows, bytes], whose numbers are as large as those of a model."""
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows * inputs // size, width), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = 126 - round(inputs**0.5).bit_length() + blocks[:, 0] % 2
        return blocks.reshape(rows, -1)
    factors = slice(-2, None) if kind.name == "Q6_K" else slice(0, 4)  # of a block, in fp16
    count = 1 if kind.name == "Q6_K" else 2

    def with_factor(factor: float) -> Any:
        blocks[:, factors] = np.full(count, factor, np.float16).view(np.uint8)
        return gguf.quants.dequantize(blocks.reshape(rows, -1), kind)

    with_factor(float(inputs**-0.5 / with_factor(1.0).std()))
    return blocks.reshape(rows, -1)


def write_gguf(path: Path, kind: Any) -> Path:
    """Write a small Llama whose matrices are of a type of GGUF."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    write_model(path.parent / "plain", CONFIG)
    names = {"embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "layers": "blk", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
             "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip
    for seed, (name, tensor) in enumerate(load_file(path.parent / "plain" / "model.safetensors").items()):
        parts = [
            names.get(part, part) for part in name.split(".") if part not in ("model", "self_attn", "mlp")
        ]
        value = tensor.float().numpy()
        if not name.endswith("_proj.weight"):
            writer.add_tensor(".".join(parts), value)
        elif kind.name in ("Q8_0", "Q4_0"):
            writer.add_tensor(".".join(parts), gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(".".join(parts), random_blocks(*value.shape, kind, seed), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"])
def test_a_gguf_file_computes_what_it_does_on_a_cpu(kind: str, rows: int, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="writes the file")
    check_checkpoint(write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind]), rows)
