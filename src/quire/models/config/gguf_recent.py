"""GGUF metadata of some models of 2025 and 2026: fields of their config.json. See gguf_families.py."""

from __future__ import annotations

import math
from typing import Any

from quire.models.config.gguf_source import GGUFSource
from quire.types import ModelError

# Numbers of xIELU in the metadata, one for each layer, which other checkpoints have as tensors.
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
_MAVERICK_EXPERTS = 128  # Llama 4 Maverick has no norms of q and k
_LOCAL_THETA = 10000.0


def apertus(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Apertus."""
    for key in XIELU:
        source.by_layer(f"xielu.{key}")
    return {"hidden_act": "xielu"}


def glm_dsa(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of GLM-5 beside those of latent attention: a file has no indexer where layers share one."""
    indexed = source.layers_with("indexer.proj.weight")
    sizes = source.integers(
        index_n_heads=".attention.indexer.head_count",
        index_head_dim=".attention.indexer.key_length",
        index_topk=".attention.indexer.top_k",
    )
    return {**sizes, "indexer_types": ["full" if each else "shared" for each in indexed]}


def gemma3n(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Gemma 3n."""
    meta, layers = source.meta, source.layers
    windowed = source.by_layer(".attention.sliding_window_pattern", [(i + 1) % 5 != 0 for i in range(layers)])
    scales = source.by_layer(".activation_sparsity_scale")
    return {
        **_per_layer_inputs(source),
        "layer_types": _kinds(windowed),
        "rope_local_base_freq": meta.number(".rope.freq_base_swa", "rope_theta", _LOCAL_THETA),
        "intermediate_size": source.by_layer(".feed_forward_length"),
        "altup_num_inputs": meta.integer(".altup.num_inputs", "altup_num_inputs"),
        "altup_active_idx": meta.get(".altup.active_idx", 0),
        "altup_correct_scale": True,
        "laurel_rank": source.shape("blk.0.laurel_l.weight")[0],
        # The file has quantiles of a normal distribution, the config the shares of gates that are cut.
        "activation_sparsity_pattern": [0.5 * (1 + math.erf(scale / math.sqrt(2))) for scale in scales],
        "final_logit_softcapping": meta.get(".final_logit_softcapping", 30.0),
    }


def gemma4(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Gemma 4."""
    meta = source.meta
    windowed = [bool(each) for each in source.by_layer(".attention.sliding_window_pattern")]
    heads, widths = source.by_layer(".attention.head_count_kv"), source.by_layer(".feed_forward_length")
    dims = {
        False: meta.integer(".attention.key_length", "head_dim"),
        True: meta.integer(".attention.key_length_swa", "head_dim"),
    }
    # One width, or two: layers that read the keys and values of another layer may have MLPs of twice the width.
    config = {
        **_per_layer_inputs(source),
        "layer_types": _kinds(windowed),
        "per_layer_config": {
            str(index): {"head_dim": dims[each], "num_key_value_heads": count}
            for index, (each, count) in enumerate(zip(windowed, heads))
        },
        "head_dim": dims[True],
        "num_key_value_heads": heads[0],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": meta.get(".rope.freq_base", 1e6)},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": meta.number(".rope.freq_base_swa", "rope_theta", _LOCAL_THETA),
            },
        },
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "attention_k_eq_v": not all(source.layers_with("attn_v.weight")[: source.layers - _shared(source)]),
        "final_logit_softcapping": meta.get(".final_logit_softcapping"),
        "enable_moe_block": bool(meta.get(".expert_count")),
    }
    return config | {"top_k_experts": meta.get(".expert_used_count")}


def llama4(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Llama 4. Chunks and growing queries are constants of llama.cpp."""
    width = source.meta.integer(".expert_feed_forward_length", "intermediate_size")
    sparse = source.layers_with("ffn_gate_inp.weight")
    if source.meta.get(".attention.sliding_window", 1) == 0:
        raise ModelError("GGUF architecture llama4 without chunks (sliding_window 0) is not supported")
    return {
        "intermediate_size": width,
        "intermediate_size_mlp": source.facts["intermediate_size"],
        "moe_layers": [index for index, each in enumerate(sparse) if each],
        "use_qk_norm": source.meta.get(".expert_count") != _MAVERICK_EXPERTS,
    }


def minimax_m2(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of MiniMax-M2."""
    return {
        "intermediate_size": source.meta.integer(".expert_feed_forward_length", "intermediate_size"),
        "rotary_dim": source.meta.integer(".rope.dimension_count", "head_dim", source.facts["head_dim"]),
    }


def mistral3(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Ministral 3 and of other models of this kind."""
    meta = source.meta
    rope: dict[str, Any] = {"rope_type": "default", "llama_4_scaling_beta": _growth(source)}
    if meta.get(".rope.scaling.type", "none") == "yarn":
        rope |= yarn(source, meta.get(".rope.scaling.yarn_log_multiplier"))
    elif rope["llama_4_scaling_beta"]:
        raise ModelError("GGUF architecture mistral3 with growing queries and without YaRN is not supported")
    return {"rope_parameters": rope | {"rope_theta": meta.number(".rope.freq_base", "rope_theta", 1e4)}}


def mistral4(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Mistral 4 beside those of latent attention."""
    rope = {"rope_theta": source.meta.number(".rope.freq_base", "rope_theta", 1e4)}
    multiplier = source.meta.get(".rope.scaling.yarn_log_multiplier")
    rope |= yarn(source, None if multiplier is None else multiplier / 0.1)
    return {"rope_scaling": None, "rope_parameters": {**rope, "llama_4_scaling_beta": _growth(source)}}


def olmo3(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of OLMo 3, whose windowed layers keep the plain rotation."""
    layers = source.layers
    pattern = source.by_layer(".attention.sliding_window_pattern", [(i + 1) % 4 != 0 for i in range(layers)])
    theta = source.meta.number(".rope.freq_base", "rope_theta", 1e4)
    return {"layer_types": _kinds(pattern), "rope_local_base_freq": theta}


def stablelm(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of StableLM 2."""
    return {
        "use_qkv_bias": source.has("attn_q.bias"),
        "use_parallel_residual": not source.has("ffn_norm.weight"),
        "qk_layernorm": source.has("attn_q_norm.weight"),
    }


def phimoe(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Phi-3.5-MoE."""
    return {"lm_head_bias": "output.bias" in source.tensors}


def yarn(source: GGUFSource, weight: float | None) -> dict[str, Any]:
    """Return YaRN's part of the rotary parameters; `weight` is the config's `mscale_all_dim`."""
    meta = source.meta
    settings = {
        "rope_type": "yarn",
        "factor": meta.number(".rope.scaling.factor", "factor"),
        "original_max_position_embeddings": meta.integer(
            ".rope.scaling.original_context_length", "original_max_position_embeddings"
        ),
        "beta_fast": meta.number(".rope.scaling.yarn_beta_fast", "beta_fast", 32.0),
        "beta_slow": meta.number(".rope.scaling.yarn_beta_slow", "beta_slow", 1.0),
    }
    return settings | ({"mscale": 1.0, "mscale_all_dim": weight} if weight else {})


def _growth(source: GGUFSource) -> float:
    return source.meta.number(".attention.temperature_scale", "llama_4_scaling_beta", 0.0)


def _per_layer_inputs(source: GGUFSource) -> dict[str, Any]:
    """Return the fields about the embeddings of each layer, and about shared keys and values."""
    table = "per_layer_token_embd.weight"
    rows = source.shape(table)[0] if table in source.tensors else 1
    return {
        "hidden_size_per_layer_input": source.meta.get(".embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": rows,
        "num_kv_shared_layers": _shared(source),
        "sliding_window": source.meta.integer(".attention.sliding_window", "sliding_window"),
    }


def _shared(source: GGUFSource) -> int:
    found = source.meta.get(".attention.shared_kv_layers", 0)
    if not isinstance(found, int) or not 0 <= found < source.layers:
        raise ModelError(
            f"{source.arch}.attention.shared_kv_layers must be below {source.layers}, got {found!r}"
        )
    return found


def _kinds(windowed: list[Any]) -> list[str]:
    return ["sliding_attention" if each else "full_attention" for each in windowed]
