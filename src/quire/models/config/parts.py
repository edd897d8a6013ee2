"""Pieces of `config.json` parsing that several families share (models/config/hf.py has the families)."""

from __future__ import annotations

from typing import Any

from quire.files.reading import shown
from quire.models.config.keys import ConfigKeys, token_ids
from quire.models.config.rope import parse_rope, served_len
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
    keys: ConfigKeys,
    *,
    window: int | None = None,
    window_from: int | None = None,
    pattern: list[str] | None = None,
    default_dim: int | None = None,
    kv_default: int | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
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
    """What the rotary families have in common.

    `kv_default`, `theta` and `eps` are what the family's class in transformers has where a config says nothing.
    """
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    absent = (
        heads if kv_default is None or keys.has("num_key_value_heads") else kv_default
    )  # null: as many as heads
    kv_heads = keys.integer("num_key_value_heads", default=absent)
    layers = keys.integer("num_hidden_layers")
    head_dim = parse_head_dim(keys, hidden, heads, default_dim)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise keys.refuse("head_dim", "even, because halves of a head turn against each other", head_dim)
    trained_len = keys.integer("max_position_embeddings", "context_window_size")
    rope, local_rope = parse_rope(keys, trained_len, theta, two_bases=family == "gemma3")
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
        norm_eps=keys.number("rms_norm_eps", default=eps),
        activation=parse_activation(activation or keys.text("hidden_act", default="silu")),
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


def common(name: str, family: str, keys: ConfigKeys, tie: bool) -> dict[str, Any]:
    vocab_size = keys.integer("vocab_size")
    bos, eos = (
        token_ids(keys.get(name, default=None), name, vocab_size, keys.where)
        for name in ("bos_token_id", "eos_token_id")
    )
    tied = keys.flag("tie_word_embeddings", default=tie)
    has_head = tied or not name.endswith("Model") or name.endswith("LMHeadModel")
    return {
        "architecture": name,
        "family": family,
        "vocab_size": vocab_size,
        # Embeddings stand in for a head that a bare model lacks: a request for a vector samples a token as well.
        "tie_embeddings": tied or not has_head,
        "has_head": has_head,
        "dtype": _dtype(keys),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": eos,
        "quantization": _quantization(keys),
    }


def _dtype(keys: ConfigKeys) -> str:
    name = keys.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(
            f"config.json: dtype {shown(name)} is not supported; supported are: {', '.join(DTYPES)}"
        )
    return name


def _quantization(keys: ConfigKeys) -> str | None:
    settings = keys.section("quantization_config")
    if not settings:
        return None
    name = settings.get("quant_method", settings.get("quant_algo", "unknown"))
    return f"quant_method {name if isinstance(name, str) and len(name) < 40 else shown(name)}"


def parse_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(
            f"activation {shown(name)} is not supported; supported are: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def parse_head_dim(keys: ConfigKeys, hidden: int, heads: int, default: int | None = None) -> int:
    dim = keys.get("head_dim", default=default)
    if dim is None and hidden % heads:
        raise ModelError(
            f"config.json has no head_dim, and hidden size {hidden} is no multiple of {heads} heads"
        )
    return keys.integer("head_dim", default=dim or hidden // heads)


def refuse_bias(name: str, keys: ConfigKeys) -> None:
    for flag in ("attention_bias", "mlp_bias"):
        if keys.flag(flag):
            raise ModelError(f"{name} with {flag} is not supported")


def window_from(keys: ConfigKeys) -> int | None:
    """Qwen: layers from `max_window_layers` on have the window, and only if `use_sliding_window`."""
    if not keys.flag("use_sliding_window"):
        return None
    return keys.integer("max_window_layers", default=28, least=0)


def _windows(
    keys: ConfigKeys, layers: int, window: int | None, pattern: list[str] | None
) -> tuple[int | None, ...]:
    kinds = keys.entries("layer_types", str) or pattern
    if kinds is None:
        kinds = ["sliding_attention"] * layers
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        problem = f"kind {shown(unknown.pop())}" if unknown else f"{len(kinds)} entries for {layers} layers"
        raise ModelError(f"config.json: layer_types with {problem} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
