"""Parts of the `config.json` parser that several families share; hf.py has the families."""

from __future__ import annotations

from typing import Any

from quire.files.reading import shown
from quire.models.config.keys import ConfigKeys, token_ids
from quire.models.config.quantization import parse_quantization
from quire.models.config.rope import parse_rope, served_len
from quire.models.spec import ModelSpec, MoESpec
from quire.quant.spec import QuantSpec
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


def decoder_spec(
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
    """Build the spec of a family with rotary embeddings.

    Args:
        name: the architecture.
        family: key of FAMILIES in models/registry.py.
        keys: the config.
        window: window in tokens of layers with sliding attention.
        window_from: first layer with a window, for families that window only the later layers.
        pattern: attention kind by layer, for a config without `layer_types`.
        default_dim, kv_default, theta, eps: head size, number of K/V heads, rotary base and epsilon for a config that
            omits them: the defaults of the family's configuration class in transformers.
        tie: default of `tie_word_embeddings`.
        moe: the experts.

    The other arguments become fields of the spec.

    Raises:
        ModelError: if a field is missing, has a bad value, or is not supported.
    """
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    # A value of null means as many as heads; a missing field means the default of the family.
    if kv_default is None or keys.has("num_key_value_heads"):
        kv_default = heads
    kv_heads = keys.integer("num_key_value_heads", default=kv_default)
    layers = keys.integer("num_hidden_layers")
    head_dim = parse_head_dim(keys, hidden, heads, default_dim)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise keys.refuse("head_dim", "even, because rotary embeddings rotate halves of a head", head_dim)
    trained_len = keys.integer("max_position_embeddings", "context_window_size")
    rope, local_rope = parse_rope(keys, trained_len, theta, two_bases=family == "gemma3")
    if window_from is not None:
        window = keys.integer("sliding_window", default=4096)
        pattern = ["sliding_attention" if i >= window_from else "full_attention" for i in range(layers)]
    return ModelSpec(
        **common_fields(name, family, keys, tie),
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


def common_fields(name: str, family: str, keys: ConfigKeys, tie: bool) -> dict[str, Any]:
    """Parse the fields of `ModelSpec` that every family has; `tie` is the default of `tie_word_embeddings`."""
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
        # A model without a head uses its embeddings as one, because a request for a vector also samples a token.
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


def _quantization(keys: ConfigKeys) -> QuantSpec | None:
    return parse_quantization(keys.section("quantization_config", "compression_config"))


def parse_activation(name: str) -> str:
    """Return Quire's name of an activation, or raise ModelError if it is not supported."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"activation {shown(name)} is not supported; supported are: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def parse_head_dim(keys: ConfigKeys, hidden: int, heads: int, default: int | None = None) -> int:
    """Return the head size: the config's, else `default`, else hidden / heads."""
    dim = keys.get("head_dim", default=default)
    if dim is None and hidden % heads:
        raise ModelError(
            f"config.json has no head_dim, and its hidden size {hidden} is not a multiple of {heads} heads"
        )
    return keys.integer("head_dim", default=dim or hidden // heads)


def refuse_bias(name: str, keys: ConfigKeys) -> None:
    """Raise ModelError if the config sets biases, for families that have none."""
    for flag in ("attention_bias", "mlp_bias"):
        if keys.flag(flag):
            raise ModelError(f"{name} with {flag} is not supported")


def window_from(keys: ConfigKeys) -> int | None:
    """Return Qwen's first layer with a window, `max_window_layers`; None unless `use_sliding_window` is set."""
    if not keys.flag("use_sliding_window"):
        return None
    return keys.integer("max_window_layers", default=28, minimum=0)


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
