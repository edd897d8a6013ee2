"""`parse_config`: a Hugging Face `config.json`, in the spellings of many years, to a `ModelSpec`.

Old and new names are both read (`torch_dtype`/`dtype`, `rope_scaling`/`rope_parameters`, GPT-2's
`n_embd`, MLC's `sliding_window_size`); defaults are those of the model's configuration class in
transformers, because that is what a config that leaves a key out means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quire.layers.rope_params import RopeParams
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
DTYPES = ("float32", "bfloat16", "float16")
_MISSING: Any = object()


class Keys:
    """Typed look-ups in a config; a key may have several spellings, the first present one counts."""

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self.config = config
        self.where = where

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is _MISSING:
            raise ModelError(f"{self.where} lacks {names[0]}")
        return default

    def integer(self, *names: str, default: Any = _MISSING) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: {names[0]} must be a positive integer, got {value!r}")
        return value

    def number(self, *names: str, default: Any = _MISSING) -> float:
        value = self.get(*names, default=default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"{self.where}: {names[0]} must be a number, got {value!r}")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        return bool(self.get(*names, default=default))

    def has(self, *names: str) -> bool:
        return any(name in self.config for name in names)


def parse_config(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `config.json` dict."""
    if not isinstance(config, dict):
        raise ModelError("config.json must hold a JSON object")
    architectures = config.get("architectures") or []
    name = architectures[0] if architectures else str(config.get("model_type") or "")
    if not name:
        raise ModelError("config.json names no architecture (neither architectures nor model_type)")
    parse = PARSERS.get(name)
    if parse is None:
        known = ", ".join(sorted(key for key in PARSERS if key[0].isupper()))
        raise ModelError(f"{name} is not supported yet; supported are: {known}")
    return parse(name, Keys(config))


# ------------------------------------------------------------------------------------- the families


def _gpt2(name: str, keys: Keys) -> ModelSpec:
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if keys.flag(flag):
            raise ModelError(f"{name} with {flag} is not supported")
    if not keys.flag("scale_attn_weights", default=True):
        raise ModelError(f"{name} without scale_attn_weights is not supported")
    hidden = keys.integer("n_embd", "hidden_size")
    heads = keys.integer("n_head", "num_attention_heads")
    layers = keys.integer("n_layer", "num_hidden_layers")
    head_dim = _head_dim(keys, hidden, heads)
    return ModelSpec(
        **_common(name, "gpt2", keys, tie=True),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("n_inner", "intermediate_size", default=4 * hidden),
        max_model_len=keys.integer("n_positions", "max_position_embeddings", "context_window_size", "n_ctx"),
        norm_eps=keys.number("layer_norm_epsilon", default=1e-5),
        activation=_activation(keys.get("activation_function", "hidden_act", default="gelu_new")),
        rope=None,
        windows=(None,) * layers,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        query_scale=head_dim**-0.5,
    )


def _llama(name: str, keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return _decoder(name, "llama", keys, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"))


def _mistral(name: str, keys: Keys) -> ModelSpec:
    _refuse_bias(name, keys)
    # a window of null is "off", a window left out is the default of transformers
    window = None if keys.has("sliding_window", "sliding_window_size") else 4096
    window = keys.get("sliding_window", "sliding_window_size", default=window)
    return _decoder(name, "llama", keys, window=window)


def _qwen2(name: str, keys: Keys) -> ModelSpec:
    return _decoder(name, "qwen", keys, qkv_bias=True, window_from=_window_from(keys))


def _qwen3(name: str, keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return _decoder(
        name, "qwen", keys, qkv_bias=bias, o_bias=bias, qk_norm=True, window_from=_window_from(keys), default_dim=128
    )


def _qwen3_moe(name: str, keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    layers = keys.integer("num_hidden_layers")
    dense = set(keys.get("mlp_only_layers", default=[]))
    every = keys.integer("decoder_sparse_step", default=1)
    moe = MoESpec(
        num_experts=keys.integer("num_experts", "num_local_experts", default=128),
        top_k=keys.integer("num_experts_per_tok", default=8),
        intermediate_size=keys.integer("moe_intermediate_size", default=768),
        norm_topk=keys.flag("norm_topk_prob"),
        sparse=tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
    )
    # this family windows every layer when it windows at all
    window = keys.get("sliding_window", default=None) if keys.flag("use_sliding_window") else None
    return _decoder(name, "moe", keys, qkv_bias=bias, o_bias=bias, qk_norm=True, window=window, moe=moe)


def _mixtral(name: str, keys: Keys) -> ModelSpec:
    _refuse_bias(name, keys)
    moe = MoESpec(
        num_experts=keys.integer("num_local_experts", "num_experts", default=8),
        top_k=keys.integer("num_experts_per_tok", default=2),
        intermediate_size=keys.integer("intermediate_size"),
        norm_topk=True,
        sparse=(True,) * keys.integer("num_hidden_layers"),
    )
    window = keys.get("sliding_window", "sliding_window_size", default=None)
    return _decoder(name, "moe", keys, window=window, moe=moe)


def _gemma3(name: str, keys: Keys) -> ModelSpec:
    if keys.has("text_config"):
        outer = {k: v for k, v in keys.config.items() if k not in ("text_config", "vision_config", "model_type")}
        shared = ("torch_dtype", "dtype", "tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id")
        inner = keys.get("text_config")
        keys = Keys({**inner, **{k: outer[k] for k in shared if outer.get(k) is not None}})
    if keys.flag("use_bidirectional_attention"):
        raise ModelError(f"{name} with use_bidirectional_attention is not supported")
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
    layers = keys.integer("num_hidden_layers")
    pattern = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    return _decoder(
        name,
        "gemma3",
        keys,
        window=keys.integer("sliding_window", "sliding_window_size"),
        pattern=pattern,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        query_scale=keys.number("query_pre_attn_scalar", default=256) ** -0.5,
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        activation=keys.get("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        tie=True,
        attn_soft_cap=keys.get("attn_logit_softcapping", default=None),
        final_soft_cap=keys.get("final_logit_softcapping", default=None),
    )


PARSERS: dict[str, Callable[[str, Keys], ModelSpec]] = {
    "GPT2LMHeadModel": _gpt2,
    "gpt2": _gpt2,
    "LlamaForCausalLM": _llama,
    "llama": _llama,
    "MistralForCausalLM": _mistral,
    "mistral": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "qwen2": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "qwen3": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3,
    "MixtralForCausalLM": _mixtral,
    "mixtral": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "qwen3_moe": _qwen3_moe,
}


# ------------------------------------------------------------------------------------ shared pieces


def _decoder(
    name: str,
    family: str,
    keys: Keys,
    *,
    window: int | None = None,
    window_from: int | None = None,
    pattern: list[str] | None = None,
    default_dim: int | None = None,
    query_scale: float | None = None,
    activation: str | None = None,
    tie: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    embedding_scale: float | None = None,
    attn_soft_cap: float | None = None,
    final_soft_cap: float | None = None,
    moe: MoESpec | None = None,
) -> ModelSpec:
    """What the rotary families have in common."""
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", default=heads)
    layers = keys.integer("num_hidden_layers")
    head_dim = _head_dim(keys, hidden, heads, default_dim)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    trained_len = keys.integer("max_position_embeddings", "context_window_size")
    rope, local_rope = parse_rope(keys, trained_len, two_bases=family == "gemma3")
    if window_from is not None:
        window = keys.integer("sliding_window", default=4096)
        pattern = ["sliding_attention" if i >= window_from else "full_attention" for i in range(layers)]
    return ModelSpec(
        **_common(name, family, keys, tie),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        max_model_len=served_len(rope, trained_len, stretch=family != "gemma3"),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        activation=_activation(activation or keys.get("hidden_act", default="silu")),
        rope=rope,
        local_rope=local_rope,
        windows=_windows(keys, layers, window, pattern),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        query_scale=head_dim**-0.5 if query_scale is None else query_scale,
        attn_soft_cap=attn_soft_cap,
        final_soft_cap=final_soft_cap,
        embedding_scale=embedding_scale,
        moe=moe,
    )


def _common(name: str, family: str, keys: Keys, tie: bool) -> dict[str, Any]:
    eos = keys.get("eos_token_id", default=[])
    return {
        "architecture": name,
        "family": family,
        "vocab_size": keys.integer("vocab_size"),
        "tie_embeddings": keys.flag("tie_word_embeddings", default=tie),
        "dtype": _dtype(keys),
        "bos_token_id": keys.get("bos_token_id", default=None),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else (eos,),
        "quantization": _quantization(keys),
    }


def _dtype(keys: Keys) -> str:
    name = str(keys.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype {name} is not supported; supported are: {', '.join(DTYPES)}")
    return name


def _quantization(keys: Keys) -> str | None:
    settings = keys.get("quantization_config", default=None)
    if not settings:
        return None
    return f"quant_method {settings.get('quant_method', settings.get('quant_algo', 'unknown'))}"


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _head_dim(keys: Keys, hidden: int, heads: int, default: int | None = None) -> int:
    dim = keys.get("head_dim", default=default)
    if dim is None and hidden % heads:
        raise ModelError(f"config.json has no head_dim, and hidden size {hidden} is no multiple of {heads} heads")
    return keys.integer("head_dim", default=dim or hidden // heads)


def _refuse_bias(name: str, keys: Keys) -> None:
    for flag in ("attention_bias", "mlp_bias"):
        if keys.flag(flag):
            raise ModelError(f"{name} with {flag} is not supported")


def _window_from(keys: Keys) -> int | None:
    """Qwen: layers from `max_window_layers` on have the window, and only if `use_sliding_window`."""
    if not keys.flag("use_sliding_window"):
        return None
    value = keys.get("max_window_layers", default=28)
    if not isinstance(value, int) or value < 0:
        raise ModelError(f"config.json: max_window_layers must be an integer of at least 0, got {value!r}")
    return value


def _windows(keys: Keys, layers: int, window: int | None, pattern: list[str] | None) -> tuple[int | None, ...]:
    kinds = keys.get("layer_types", default=pattern)
    if kinds is None:
        kinds = ["sliding_attention"] * layers
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        problem = f"kind {unknown.pop()!r}" if unknown else f"{len(kinds)} entries for {layers} layers"
        raise ModelError(f"config.json: layer_types with {problem} is not supported")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ModelError(f"config.json: sliding_window must be a positive integer, got {window!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


# ------------------------------------------------------------------------------------------- rotary


def parse_rope(keys: Keys, trained_len: int, two_bases: bool = False) -> tuple[RopeParams, RopeParams | None]:
    """(global, local) rotary parameters; `two_bases` for families whose windowed layers have their own."""
    settings = keys.get("rope_parameters", "rope_scaling", default={})
    nested = {k: v for k, v in settings.items() if isinstance(v, dict)}
    for factor in (keys.get("partial_rotary_factor", default=1.0), settings.get("partial_rotary_factor") or 1.0):
        if factor != 1.0:
            raise ModelError(f"partial rotary embeddings are not supported (partial_rotary_factor {factor})")
    if keys.flag("rope_interleaved"):
        raise ModelError("interleaved rotary embeddings (rope_interleaved) are not supported")
    theta = keys.number("rope_theta", default=10000.0)
    extra = {"original_max_position_embeddings": keys.get("original_max_position_embeddings", default=None)}
    if not two_bases:
        if nested:
            raise ModelError("rope_parameters per layer type are supported for Gemma 3 only")
        return _rope({**extra, **settings}, theta, trained_len), None
    local_theta = keys.number("rope_local_base_freq", default=10000.0)
    full = nested.get("full_attention", {}) if nested else settings
    return (
        _rope(full, theta, trained_len),
        _rope(nested.get("sliding_attention") or {}, local_theta, trained_len),
    )


def _rope(settings: dict[str, Any], theta: float, trained_len: int) -> RopeParams:
    keys = Keys(settings, "rope parameters")
    kind = keys.get("rope_type", "type", default="default")
    theta = keys.number("rope_theta", default=theta)
    if kind == "default":
        return RopeParams(theta=theta, original_max_len=trained_len)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ModelError(f"rope type {kind!r} is not supported; supported are: default, linear, dynamic, llama3, yarn")
    original = keys.integer("original_max_position_embeddings", default=trained_len)
    factor = keys.number("factor", default=trained_len / original)
    if factor < 1:
        raise ModelError(f"rope parameters: factor must be at least 1, got {factor}")
    return RopeParams(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=original,
        low_freq_factor=keys.number("low_freq_factor", default=1.0),
        high_freq_factor=keys.number("high_freq_factor", default=4.0),
        beta_fast=keys.number("beta_fast", default=32.0),
        beta_slow=keys.number("beta_slow", default=1.0),
        truncate=keys.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(keys, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(keys: Keys, factor: float) -> float:
    """0.1 ln(factor) + 1 unless given (YaRN, arXiv:2309.00071, section 3.4)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    above, below = keys.get("mscale", default=0), keys.get("mscale_all_dim", default=0)
    default = mscale(above) / mscale(below) if above and below else mscale(1.0)
    return keys.number("attention_factor", default=default)


def served_len(rope: RopeParams, trained_len: int, stretch: bool = True) -> int:
    """How long a context may be served.

    yarn stretches the original context by `factor`, linear the stated one (not where the stated one
    already counts it: `stretch` False). dynamic stays within the original: beyond it all angles
    depend on the length of the sequence, which keys already in the cache cannot follow.
    """
    if rope.kind == "yarn":
        return max(trained_len, round(rope.original_max_len * rope.factor))
    if rope.kind == "linear" and stretch:
        return round(trained_len * rope.factor)
    return min(trained_len, rope.original_max_len) if rope.kind == "dynamic" else trained_len
