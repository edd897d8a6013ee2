"""A tiny random Qwen3 checkpoint with a byte-level tokenizer, for tests that need any model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 257, "dtype": "float32",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(folder: Path, seed: int = 0) -> Path:
    """Write config, weights, tokenizer and chat template, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)

    tensors = {"model.embed_tokens.weight": random(260, 32), "model.norm.weight": random(32)}
    for i in range(2):
        p = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32),
            "self_attn.o_proj": (32, 64), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,),
            "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
            "input_layernorm": (32,), "post_attention_layernorm": (32,),
        }.items():  # fmt: skip
            tensors[f"{p}{name}.weight"] = random(*shape)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    return folder


HYBRID = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 32, "intermediate_size": 48,
    "block_auto_adjust_ff_dim": False, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1600, "max_position_embeddings": 256, "norm_eps": 1e-5, "conv_L_cache": 3, "eos_token_id": 2,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"], "dtype": "float32",
}  # fmt: skip


def write_hybrid(folder: Path, seed: int = 5, heads: int = 4) -> Path:
    """Write config and weights of a model of convolutions and attention, without a tokenizer. Return the folder.

    Kernels of a GPU need heads of at least 16 numbers, so `heads` must be 2 there.
    """
    dim = 32 // heads
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)

    attention = {
        "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
        "self_attn.out_proj": (32, 32), "self_attn.q_layernorm": (dim,), "self_attn.k_layernorm": (dim,),
    }  # fmt: skip
    convolution = {"conv.in_proj": (96, 32), "conv.conv": (32, 1, 3), "conv.out_proj": (32, 32)}
    both = {
        "feed_forward.w1": (48, 32), "feed_forward.w3": (48, 32), "feed_forward.w2": (32, 48),
        "operator_norm": (32,), "ffn_norm": (32,),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": random(1600, 32), "model.embedding_norm.weight": random(32)}
    for i, kind in enumerate(HYBRID["layer_types"]):
        own: dict[str, tuple[int, ...]] = convolution if kind == "conv" else attention
        for name, shape in {**own, **both}.items():
            tensors[f"model.layers.{i}.{name}.weight"] = random(*shape)
    save_file(tensors, folder / "model.safetensors")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    (folder / "config.json").write_text(json.dumps({**HYBRID, **sizes}))
    return folder
