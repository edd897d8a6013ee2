"""GGUF metadata of the families in models/families/: it is translated to a config.json, which the family parses.

Facts that llama.cpp keeps in its code instead of the file are the defaults of the family, or are listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.layers.rope_params import RopeParams
from quire.models.config import gguf_hybrids, gguf_recent
from quire.models.config.gguf_source import GGUFMetadata, GGUFSource
from quire.models.config.hf import parsers
from quire.models.config.keys import ConfigKeys
from quire.models.config.rope import served_len
from quire.models.families import catalogue
from quire.models.spec import ModelSpec
from quire.types import ModelError


def _unchanged(spec: ModelSpec, source: GGUFSource) -> ModelSpec:
    return spec


@dataclass(frozen=True, slots=True)
class Translation:
    """What only some architectures have.

    Attributes:
        fields: further fields of the config, by their keys in the file.
        has_window: whether the file may set a window.
        config: function that returns further fields of the config.
        adapt: function that changes the parsed spec where files differ from other checkpoints.
        own_rope: whether the family parses the rotary embeddings from the config.
    """

    fields: dict[str, str] = field(default_factory=dict)
    has_window: bool = False
    config: Callable[[GGUFSource], dict[str, Any]] | None = None
    adapt: Callable[[ModelSpec, GGUFSource], ModelSpec] = _unchanged
    own_rope: bool = False


_CAPS = {
    ".attn_logit_softcapping": "attn_logit_softcapping",
    ".final_logit_softcapping": "final_logit_softcapping",
}
_LOGIT_SCALE = {".logit_scale": "logit_scale"}
_GRANITE = {
    ".attention.scale": "attention_multiplier",
    ".embedding_scale": "embedding_multiplier",
    ".residual_scale": "residual_multiplier",
    ".logit_scale": "logits_scaling",
}
_YARN_LOG = 0.1  # factor of the logarithm in a file's multiplier, and in the formula of YaRN's mscale
# Fields of a file by keys, and the names that families have for them.
_EXPERT_FIELDS = {
    ".expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ".expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    ".expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    ".expert_feed_forward_length": ("moe_intermediate_size",),
    ".expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    ".expert_group_count": ("n_group",),
    ".expert_group_used_count": ("topk_group",),
    ".expert_weights_norm": ("norm_topk_prob",),
    ".expert_weights_scale": ("routed_scaling_factor",),
    ".leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    ".interleave_moe_layer_step": ("moe_layer_interval",),
    ".nextn_predict_layers": ("num_nextn_predict_layers",),
}
_SIGMOID = 2  # in .expert_gating_func; 1 is a softmax
_QWEN_NEXT = Translation(config=gguf_hybrids.qwen_next)
_NEMOTRON_H = Translation(config=gguf_hybrids.nemotron_h)
TRANSLATIONS = {
    "apertus": Translation(config=gguf_recent.apertus),
    "arcee": Translation(),
    "chatglm": Translation(),
    "cohere2": Translation(_LOGIT_SCALE, has_window=True),
    "command-r": Translation(_LOGIT_SCALE),
    "deepseek2": Translation(own_rope=True),
    "dots1": Translation(),
    "ernie4_5": Translation(),
    "ernie4_5-moe": Translation(),
    "exaone4": Translation(has_window=True),
    "falcon-h1": Translation(config=gguf_hybrids.falcon_h1),
    "gemma": Translation(),
    "gemma2": Translation(_CAPS, has_window=True),
    "gemma3n": Translation(config=gguf_recent.gemma3n, has_window=True),
    "gemma4": Translation(config=gguf_recent.gemma4, has_window=True),
    "glm-dsa": Translation(config=gguf_recent.glm_dsa, own_rope=True),
    "glm4": Translation(),
    "glm4moe": Translation(),
    "gpt-oss": Translation(has_window=True),
    "granite": Translation(_GRANITE),
    "granitehybrid": Translation(
        _GRANITE, config=gguf_hybrids.granite_hybrid, adapt=gguf_hybrids.with_split_gate
    ),
    "granitemoe": Translation(_GRANITE),
    "hunyuan-dense": Translation(),
    "hunyuan-moe": Translation(),
    "jamba": Translation(config=gguf_hybrids.jamba, adapt=gguf_hybrids.with_layers_of_jamba),
    "kimi-linear": Translation(config=gguf_hybrids.kimi_linear, own_rope=True),
    "lfm2": Translation(),
    "lfm2moe": Translation(),
    "llama4": Translation(config=gguf_recent.llama4, has_window=True),
    "minimax-m2": Translation(config=gguf_recent.minimax_m2),
    "mistral3": Translation(config=gguf_recent.mistral3, own_rope=True),
    "mistral4": Translation(config=gguf_recent.mistral4, own_rope=True),
    "nemotron": Translation(),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "olmo2": Translation(has_window=True),
    "olmoe": Translation(),
    "phi2": Translation(),
    "phi3": Translation(has_window=True),
    "phimoe": Translation(config=gguf_recent.phimoe, has_window=True),
    "qwen2moe": Translation(),
    "qwen35": _QWEN_NEXT,
    "qwen35moe": _QWEN_NEXT,
    "qwen3next": replace(_QWEN_NEXT, adapt=gguf_hybrids.with_split_projections),
    "seed_oss": Translation(),
    "smollm3": Translation(),
    "stablelm": Translation(config=gguf_recent.stablelm),
    "starcoder2": Translation(),
}
# Architectures of files that have latent attention.
LATENT = ("deepseek2", "glm-dsa", "kimi-linear", "mistral4")
_GEMMA2_27B_LAYERS = 46  # Gemma 2 27B scales queries by hidden / heads instead of by head_dim


def translated_spec(
    arch: str, meta: GGUFMetadata, facts: dict[str, Any], tensors: dict[str, Any], rope: RopeParams | None
) -> ModelSpec:
    """Build the spec of a file whose architecture is in TRANSLATIONS.

    Args:
        arch: the file's architecture.
        meta: its metadata.
        facts: fields of the spec that all architectures have.
        tensors: the tensors by name.
        rope: base and scaling of its rotary embeddings; None: those that the family parses.

    Raises:
        ModelError: if a key is missing, has a bad value, or the model is not supported.
    """
    rule, drafts = TRANSLATIONS[arch], meta.get(".nextn_predict_layers", 0)
    if not isinstance(drafts, int) or not 0 <= drafts < facts["num_layers"]:
        raise ModelError(
            f"{arch}.nextn_predict_layers must be below {facts['num_layers']} layers, got {drafts!r}"
        )
    source = GGUFSource(arch, meta, facts, tensors, facts["num_layers"] - drafts)
    keys = ConfigKeys(_config(rule, source), str(meta.path))
    name = _architecture(source)
    spec = rule.adapt(parsers()[name](name, keys), source)
    assert spec.rope is not None
    rope = rope or spec.rope
    if "rope_factors_long.weight" in tensors:
        rope = _longrope(rope, meta, tensors)
    rope = replace(
        rope, rotary_dim=spec.rope.rotary_dim, interleaved=spec.rope.interleaved, truncate=spec.rope.truncate
    )
    kept = ("architecture", "dtype", "bos_token_id", "eos_token_ids", "quantization")
    return replace(
        spec,
        rope=rope,
        max_model_len=served_len(rope, spec.max_model_len, stretch=False),
        # Experts have the usual names in all files.
        names={name: own for name, own in spec.names.items() if name not in ("gate", "experts")},
        extra_layers=drafts,
        **{name: facts[name] for name in kept if name in facts},
    )


def _architecture(source: GGUFSource) -> str:
    """Return the name in transformers of the file's architecture; one of files may stand for several."""
    meta = source.meta
    if source.arch == "deepseek2":
        return (
            "DeepseekV3ForCausalLM"
            if meta.get(".expert_gating_func") == _SIGMOID
            else "DeepseekV2ForCausalLM"
        )
    if source.arch == "olmo2":
        return "Olmo3ForCausalLM" if meta.get(".attention.sliding_window") else "Olmo2ForCausalLM"
    return next(family.architectures[0] for family in catalogue() if source.arch in family.gguf)


def _config(rule: Translation, source: GGUFSource) -> dict[str, Any]:
    arch, meta, facts = source.arch, source.meta, source.facts
    heads, head_dim = facts["num_heads"], facts["head_dim"]
    eps = meta.get(".attention.layer_norm_rms_epsilon") or meta.get(".attention.layer_norm_epsilon")
    biases = {name: source.has(f"{name}.bias") for name in ("attn_q", "attn_output", "ffn_down")}
    config: dict[str, Any] = {
        "vocab_size": facts["vocab_size"],
        "hidden_size": facts["hidden_size"],
        "intermediate_size": facts["intermediate_size"],
        "num_hidden_layers": source.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts["num_kv_heads"],
        "head_dim": head_dim,
        "tie_word_embeddings": facts["tie_embeddings"],
        "max_position_embeddings": meta.integer(".context_length", "max_position_embeddings"),
        "partial_rotary_factor": meta.integer(".rope.dimension_count", "head_dim", head_dim) / head_dim,
        "rope_theta": meta.number(".rope.freq_base", "rope_theta", 10000.0),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"), eps),
        **dict.fromkeys(("attention_bias", "use_bias"), biases["attn_q"]),
        "attention_out_bias": biases["attn_output"],
        "mlp_bias": biases["ffn_down"],
        "use_qk_norm": source.has("attn_q_norm.weight"),
    }
    window = meta.get(".attention.sliding_window") or None
    if window and not rule.has_window:
        raise ModelError(f"GGUF architecture {arch!r} with a sliding window is not supported")
    config["sliding_window"] = window
    if arch == "gemma2":
        is_27b = facts["num_layers"] == _GEMMA2_27B_LAYERS
        config["query_pre_attn_scalar"] = facts["hidden_size"] / heads if is_27b else head_dim
    if meta.get(".expert_count"):
        config |= _experts(meta)
        if arch == "gpt-oss":
            width = meta.integer(
                ".expert_feed_forward_length", "intermediate_size", facts["intermediate_size"]
            )
            config["intermediate_size"] = width
    if arch in LATENT:
        config |= _latent(source)
    if arch.startswith("lfm2"):
        config |= _convolutions(source)
    if arch == "exaone4" and window is None:
        config["layer_types"] = ["full_attention"] * source.layers
    if arch == "olmo2" and window:
        config |= gguf_recent.olmo3(source)
    if rule.config:
        config |= rule.config(source)
    for key, name in rule.fields.items():
        if meta.get(key) is not None:
            config[name] = meta.number(key, name)
    return config


def _experts(meta: GGUFMetadata) -> dict[str, Any]:
    """Return the fields of a config about experts."""
    config: dict[str, Any] = {
        name: value
        for key, names in _EXPERT_FIELDS.items()
        if (value := meta.get(key)) is not None
        for name in names
    }
    meta.integer(".expert_used_count", "num_experts_per_tok")  # has no default
    config.setdefault("n_shared_experts", 0)
    return config


def _latent(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of a config about latent attention, and its rotary embeddings."""
    meta = source.meta
    rotary = meta.integer(".rope.dimension_count", "qk_rope_head_dim")
    # Older files have the sizes of whole heads at the usual keys; newer ones have those of cached entries there.
    key = meta.integer(".attention.key_length_mla", "head_dim", meta.get(".attention.key_length"))
    value = meta.integer(".attention.value_length_mla", "v_head_dim", meta.get(".attention.value_length"))
    config: dict[str, Any] = {
        "q_lora_rank": meta.get(".attention.q_lora_rank"),
        "kv_lora_rank": meta.integer(".attention.kv_lora_rank", "kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "partial_rotary_factor": 1.0,
    }
    if meta.get(".expert_group_count", 1) > 1:
        grouped = meta.get(".expert_gating_func") != _SIGMOID
        config["topk_method"] = "group_limited_greedy" if grouped else "noaux_tc"
    if meta.get(".rope.scaling.type", "none") == "yarn":
        multiplier = meta.get(".rope.scaling.yarn_log_multiplier")
        weight = multiplier / _YARN_LOG if multiplier else None
        # A file has one of the two weights; published models have the same value for both.
        config["rope_scaling"] = gguf_recent.yarn(source, weight) | ({"mscale": weight} if weight else {})
    return config


def _convolutions(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of a config about LFM2's layers."""
    attends = source.layers_with("attn_q.weight")
    return {
        "layer_types": ["full_attention" if attend else "conv" for attend in attends],
        "conv_L_cache": source.meta.integer(".shortconv.l_cache", "conv_L_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "use_expert_bias": True,
    }


def _longrope(rope: RopeParams, meta: GGUFMetadata, tensors: Mapping[str, Any]) -> RopeParams:
    """Return the parameters of Phi-3's rule, whose divisors are tensors."""
    short, long = (
        tuple(np.asarray(tensors[f"rope_factors_{name}.weight"].data, dtype=np.float32).tolist())
        for name in ("short", "long")
    )
    return replace(
        rope,
        kind="longrope",
        original_max_len=meta.integer(
            ".rope.scaling.original_context_length", "original_max_position_embeddings", rope.original_max_len
        ),
        attention_factor=meta.number(".rope.scaling.attn_factor", "attention_factor", 1.0),
        divisors=short,
        long_divisors=long,
    )
