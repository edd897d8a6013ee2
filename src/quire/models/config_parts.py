"""Pieces of `config.json` parsing that several families share (models/config_json.py has the families)."""

from __future__ import annotations

from typing import Any

from quire.models.config_keys import Keys
from quire.models.config_rope import parse_rope, served_len
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


def decoder(
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
    head_dim = parse_head_dim(keys, hidden, heads, default_dim)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    trained_len = keys.integer("max_position_embeddings", "context_window_size")
    rope, local_rope = parse_rope(keys, trained_len, two_bases=family == "gemma3")
    if window_from is not None:
        window = keys.integer("sliding_window", default=4096)
        pattern = ["sliding_attention" if i >= window_from else "full_attention" for i in range(layers)]
    return ModelSpec(
        **common(name, family, keys, tie),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        max_model_len=served_len(rope, trained_len, stretch=family != "gemma3"),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        activation=parse_activation(activation or keys.get("hidden_act", default="silu")),
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


def common(name: str, family: str, keys: Keys, tie: bool) -> dict[str, Any]:
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


def parse_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def parse_head_dim(keys: Keys, hidden: int, heads: int, default: int | None = None) -> int:
    dim = keys.get("head_dim", default=default)
    if dim is None and hidden % heads:
        raise ModelError(
            f"config.json has no head_dim, and hidden size {hidden} is no multiple of {heads} heads"
        )
    return keys.integer("head_dim", default=dim or hidden // heads)


def refuse_bias(name: str, keys: Keys) -> None:
    for flag in ("attention_bias", "mlp_bias"):
        if keys.flag(flag):
            raise ModelError(f"{name} with {flag} is not supported")


def window_from(keys: Keys) -> int | None:
    """Qwen: layers from `max_window_layers` on have the window, and only if `use_sliding_window`."""
    if not keys.flag("use_sliding_window"):
        return None
    value = keys.get("max_window_layers", default=28)
    if not isinstance(value, int) or value < 0:
        raise ModelError(f"config.json: max_window_layers must be an integer of at least 0, got {value!r}")
    return value


def _windows(
    keys: Keys, layers: int, window: int | None, pattern: list[str] | None
) -> tuple[int | None, ...]:
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
