"""Where a GGUF file has a tensor of a Hugging Face checkpoint: `GGUFNames`."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

import gguf

from quire.models.config.gguf_recent import XIELU

IN_SPEC = {
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
}  # read with the metadata

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.embeddings": "token_embd",  # of Nemotron-H
    "model.norm": "output_norm",
    "model.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",  # of LFM2
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_STREAMS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
# Tensors of a layer that have no suffix, or another one than weight and bias, by the last part of their name.
_WHOLE_NAMES = {
    **{name: f"xielu.{name}" for name in XIELU},  # metadata of the file, see gguf.py
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
    "scale": "ffn_gate_inp.scale",  # of Gemma 4's router
    "per_expert_scale": "ffn_down_exps.scale",
}
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
_TABLES = {
    "gemma3": {**_LAYER, **_GEMMA3},
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "qwen2", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"), _LAYER),
}
# Names that the converter makes itself, beside its table; several in the order in which they are tried.
_OWN_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "granitehybrid": {
        f"shared_mlp.{name}": (f"ffn_{which}_shexp", f"ffn_{which}")
        for name, which in (("gate_proj", "gate"), ("up_proj", "up"), ("output_linear", "down"))
    },
    "qwen3next": {
        "linear_attn.in_proj_qkv": ("attn_qkv",),
        "linear_attn.in_proj_z": ("attn_gate",),
        "linear_attn.in_proj_b": ("ssm_ba",),
        "linear_attn.in_proj_a": ("ssm_ba",),
    },
}
_PREFIXES = ("model.layers.0.", "backbone.layers.0.")
_NAME = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_EXPERT = re.compile(
    r"(?:(?:mlp|mixer|feed_forward|block_sparse_moe)\.)?(?:experts\.)?(\d+)\.(\w+?_proj|w[123])"
)
_PROJECTIONS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_HALVES = ("gate", "up")


@dataclass(frozen=True, slots=True)
class GGUFPlace:
    """Where a file has a tensor.

    Attributes:
        name: name of the stored tensor; empty: there is no name for it.
        index: number of the matrix in a stack of matrices; None: the tensor is no stack.
        half: 0 or 1 for the first or second half of the rows; None: all rows.
    """

    name: str
    index: int | None = None
    half: int | None = None


class GGUFNames:
    """The names of a file of the architecture `arch` that has the tensors `stored`."""

    def __init__(self, arch: str, stored: Container[str]) -> None:
        self._stored = stored
        self._layer = layer_names(arch)

    def find(self, name: str) -> GGUFPlace:
        """Return where the tensor with the Hugging Face name `name` is, or would be."""
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return GGUFPlace(f"{_TOP[stem]}.{kind}")
        stack, _, number = stem.removeprefix("model.").partition(".")
        if stack in _STREAMS and number.isdecimal():
            return GGUFPlace(f"{_STREAMS[stack]}.{kind}", int(number))
        match = _NAME.fullmatch(name)
        if match is None:
            return GGUFPlace("")
        layer, inner, kind = match.groups()
        block, last = f"blk.{layer}.", inner.rpartition(".")[2]
        if not kind and last in _WHOLE_NAMES:
            return GGUFPlace(block + _WHOLE_NAMES[last])
        kind = kind or "weight"  # attention sinks have no kind in Hugging Face's checkpoints
        if (expert := _EXPERT.fullmatch(inner)) and expert[2] in _PROJECTIONS:
            return self._expert(block, int(expert[1]), _PROJECTIONS[expert[2]], kind)
        if inner not in self._layer:
            return GGUFPlace("")
        # Some tensors have no suffix, such as one norm of Falcon-H1.
        names = [name for each in self._layer[inner] for name in (f"{block}{each}.{kind}", block + each)]
        return GGUFPlace(next((each for each in names if each in self._stored), names[0]))

    def _expert(self, block: str, number: int, which: str, kind: str) -> GGUFPlace:
        single = f"{block}ffn_{which}.{number}.{kind}"  # old files do not stack experts
        if single in self._stored:
            return GGUFPlace(single)
        both = f"{block}ffn_gate_up_exps.{kind}"
        if which in _HALVES and both in self._stored:
            return GGUFPlace(both, number, _HALVES.index(which))
        return GGUFPlace(f"{block}ffn_{which}_exps.{kind}", number)


def layer_names(arch: str) -> dict[str, tuple[str, ...]]:
    """Return the GGUF names of a layer's tensors by their Hugging Face names, both without the layer's prefix.

    Architectures that are not listed above have the names of the converter's own table.
    """
    found = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if arch in _TABLES or arch not in found:
        return {name: (theirs,) for name, theirs in _TABLES.get(arch, _LAYER).items()}
    mapping = gguf.get_tensor_name_map(found[arch], 1).mapping
    names = {
        name.removeprefix(prefix).removesuffix(".weight"): (
            theirs.removeprefix("blk.0.").removesuffix(".weight"),
        )
        for prefix in reversed(_PREFIXES)
        for name, (_, theirs) in mapping.items()
        if name.startswith(prefix)
    }
    return {**names, **_OWN_NAMES.get(arch, {})}
