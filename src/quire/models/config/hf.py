"""`parse_config`: from a Hugging Face `config.json` to a `ModelSpec`.

Old and new names of fields are accepted (`torch_dtype`/`dtype`, `rope_scaling`/`rope_parameters`, GPT-2's `n_embd`,
MLC's `sliding_window_size`). A missing field means the default of the model's configuration class in transformers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

from quire.files.reading import shown
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import (
    common_fields,
    decoder_spec,
    optional_window,
    parse_activation,
    parse_head_dim,
    refuse_bias,
    refuse_bidirectional,
    routing,
    text_part,
    window_from,
)
from quire.models.config.rope import RopeDefaults
from quire.models.families import Parser, catalogue
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError


def parse_config(config: dict[str, Any]) -> ModelSpec:
    """Parse the contents of a `config.json`.

    Raises:
        ModelError: if a field is missing or has a bad value, or if the model is not supported; names it.
    """
    if not isinstance(config, dict):
        raise ModelError("config.json must hold a JSON object")
    keys = ConfigKeys(config)
    architectures = keys.entries("architectures", str)
    name = architectures[0] if architectures else keys.text("model_type", default="")
    if not name:
        raise ModelError("config.json names no architecture (neither architectures nor model_type)")
    parse = parsers().get(name)
    if parse is None and keys.section("text_config"):  # a model with images, for example
        keys = text_part(keys)
        parse = parsers().get(keys.text("model_type", default=name))
    if parse is None:
        raise ModelError(unsupported(name))
    try:
        return parse(name, keys)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"config.json of {name} holds a value of a wrong type ({shown(error)})") from error


def parsers() -> dict[str, Parser]:
    """Return the parsers by architecture, with and without a head, and by `model_type`."""
    return {**PARSERS, **{name: family.parse for family in catalogue() for name in family.architectures}}


def unsupported(name: str) -> str:
    """Return the message for an architecture that is not supported, with the most similar supported ones."""
    known = sorted(key for key in parsers() if key[0].isupper())
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    listed = f"the nearest supported are {', '.join(near)}" if near else "no supported one has a similar name"
    return (
        f"{name if len(name) < 80 else shown(name)} is not supported; {listed}; `quire doctor` lists all "
        "supported ones"
    )


# ------------------------------------------------------------------------------------- the families


def _gpt2(name: str, keys: ConfigKeys) -> ModelSpec:
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if keys.flag(flag):
            raise ModelError(f"{name} with {flag} is not supported")
    if not keys.flag("scale_attn_weights", default=True):
        raise ModelError(f"{name} without scale_attn_weights is not supported")
    hidden = keys.integer("n_embd", "hidden_size")
    heads = keys.integer("n_head", "num_attention_heads")
    layers = keys.integer("n_layer", "num_hidden_layers")
    positions = keys.integer("n_positions", "max_position_embeddings", "context_window_size", "n_ctx")
    head_dim = parse_head_dim(keys, hidden, heads)
    return ModelSpec(
        **common_fields(name, "gpt2", keys, tie=True),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("n_inner", "intermediate_size", default=4 * hidden),
        max_model_len=positions,
        num_positions=positions,
        norm_eps=keys.number("layer_norm_epsilon", default=1e-5),
        activation=parse_activation(keys.text("activation_function", "hidden_act", default="gelu_new")),
        rope=None,
        mlp="plain",
        windows=(None,) * layers,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        query_scale=head_dim**-0.5,
    )


def _llama(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(name, "llama", keys, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"))


def _mistral(name: str, keys: ConfigKeys) -> ModelSpec:
    refuse_bias(name, keys)
    # null turns the window off; a missing field means the default of transformers.
    default = None if keys.has("sliding_window", "sliding_window_size") else 4096
    return decoder_spec(name, "llama", keys, window=optional_window(keys, default), kv_default=8)


def _qwen2(name: str, keys: ConfigKeys) -> ModelSpec:
    return decoder_spec(name, "qwen", keys, qkv_bias=True, window_from=window_from(keys), kv_default=32)


def _qwen3(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return decoder_spec(
        name,
        "qwen",
        keys,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        window_from=window_from(keys),
        default_dim=128,
        kv_default=32,
    )


def _qwen3_moe(name: str, keys: ConfigKeys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    layers = keys.integer("num_hidden_layers")
    dense = set(keys.entries("mlp_only_layers", int) or [])
    every = keys.integer("decoder_sparse_step", default=1)
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_experts", "num_local_experts", default=128),
            keys.integer("num_experts_per_tok", default=8),
            renormalise=keys.flag("norm_topk_prob"),
        ),
        intermediate_size=keys.integer("moe_intermediate_size", default=768),
        sparse=tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
    )
    # This family has a window in all layers or in none.
    window = optional_window(keys) if keys.flag("use_sliding_window") else None
    return decoder_spec(
        name,
        "moe",
        keys,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        window=window,
        moe=moe,
        kv_default=4,
    )


def _mixtral(name: str, keys: ConfigKeys) -> ModelSpec:
    refuse_bias(name, keys)
    moe = MoESpec(
        routing=routing(
            keys,
            keys.integer("num_local_experts", "num_experts", default=8),
            keys.integer("num_experts_per_tok", default=2),
            renormalise=True,
        ),
        intermediate_size=keys.integer("intermediate_size"),
        sparse=(True,) * keys.integer("num_hidden_layers"),
    )
    return decoder_spec(
        name,
        "moe",
        keys,
        window=optional_window(keys),
        moe=moe,
        kv_default=8,
        theta=1e6,
        eps=1e-5,
    )


def _gemma3(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = text_part(keys)
    refuse_bidirectional(name, keys)
    bias = keys.flag("attention_bias")
    defaults = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
    alias = {"sliding_window": "sliding_window_size", "max_position_embeddings": "context_window_size"}
    for key, value in defaults.items():
        if keys.get(key, alias.get(key, key), default=None) is None:
            keys.config = {**keys.config, key: value}
    every = keys.integer("sliding_window_pattern", "_sliding_window_pattern")
    soft_capped = keys.get("final_logit_softcapping", default=None) is not None
    layers = keys.integer("num_hidden_layers")
    pattern = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    return decoder_spec(
        name,
        "gemma3",
        keys,
        window=keys.integer("sliding_window", "sliding_window_size"),
        pattern=pattern,
        rope=RopeDefaults(local_theta=10000.0),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        query_scale=keys.number("query_pre_attn_scalar", default=256) ** -0.5,
        layout="sandwich",
        norm="offset_rms",
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        rounds_embedding_scale=True,
        activation=keys.text("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        tie=True,
        # The config's attn_logit_softcapping is ignored, as in transformers.
        final_soft_cap=keys.number("final_logit_softcapping") if soft_capped else None,
    )


_FAMILIES: dict[Callable[[str, ConfigKeys], ModelSpec], tuple[str, ...]] = {
    _gpt2: ("GPT2LMHeadModel", "GPT2Model", "gpt2"),
    _llama: ("LlamaForCausalLM", "LlamaModel", "llama"),
    _mistral: ("MistralForCausalLM", "MistralModel", "mistral"),
    _qwen2: ("Qwen2ForCausalLM", "Qwen2Model", "qwen2"),
    _qwen3: ("Qwen3ForCausalLM", "Qwen3Model", "qwen3"),
    _gemma3: (
        "Gemma3ForCausalLM", "Gemma3TextModel", "gemma3_text",
        "Gemma3ForConditionalGeneration", "Gemma3Model", "gemma3",
    ),
    _mixtral: ("MixtralForCausalLM", "MixtralModel", "mixtral"),
    _qwen3_moe: ("Qwen3MoeForCausalLM", "Qwen3MoeModel", "qwen3_moe"),
}  # fmt: skip
# Keys are architectures, with and without a head, and values of model_type.
PARSERS = {name: parse for parse, names in _FAMILIES.items() for name in names}
