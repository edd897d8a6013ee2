"""What llama.cpp's converter does to names and values of tensors, by architecture of the file."""

from __future__ import annotations

import gguf

REORDERED = ("llama", "arcee", "granite", "smollm3")  # rows of q and k: neighbouring pairs instead of halves
OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "nemotron")  # 1 is added to the weights of norms
IN_SPEC = {
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
}  # read with the metadata

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_TABLES = {"gemma3": {**_LAYER, **_GEMMA3}, "gpt2": _GPT2}
_IN_LAYER = "model.layers.0."


def layer_names(arch: str) -> dict[str, str]:
    """Return the GGUF names of a layer's tensors by their Hugging Face names, both without the layer's prefix.

    Architectures that are not listed above have the names of the converter's own table.
    """
    found = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if arch in _TABLES or arch in ("llama", "qwen2", "qwen3", "qwen3moe") or arch not in found:
        return _TABLES.get(arch, _LAYER)
    mapping = gguf.get_tensor_name_map(found[arch], 1).mapping
    return {
        name.removeprefix(_IN_LAYER): theirs.removeprefix("blk.0.")
        for name, (_, theirs) in mapping.items()
        if name.startswith(_IN_LAYER)
    }
