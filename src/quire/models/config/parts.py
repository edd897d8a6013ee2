"""Parts of the `config.json` parser that several families share; hf.py has the families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.files.reading import shown
from quire.layers.routing_params import Routing
from quire.models.config.keys import ConfigKeys, token_ids
from quire.models.config.quantization import parse_quantization
from quire.models.config.rope import RopeDefaults, parse_rope, served_len
from quire.models.spec import ModelSpec
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
    "relu2": "relu2",
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
    rope: RopeDefaults | None = None,
    theta: float | None = None,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    query_scale: float | None = None,
    activation: str | None = None,
    tie: bool = False,
    **fields: Any,
) -> ModelSpec:
    """Build the spec of a family with rotary embeddings.

    Args:
        name: the architecture.
        family: name of the family.
        keys: the config.
        window: window in tokens of layers with sliding attention.
        window_from: first layer with a window, for families that window only the later layers.
        pattern: attention kind by layer, for a config without `layer_types`.
        default_dim, kv_default, eps: head size, number of K/V heads and epsilon for a config that omits them: the
            defaults of the family's configuration class in transformers.
        rope: the family's rotary embeddings.
        theta: default of the rotary base, instead of that of `rope`.
        eps_key: name of the epsilon in the config.
        query_scale: factor of the scores; None: 1 / sqrt(head size).
        activation: the activation; None: that of the config, and silu by default.
        tie: default of `tie_word_embeddings`.
        **fields: further fields of the spec.

    Raises:
        ModelError: if a field is missing, has a bad value, or is not supported.
    """
    hidden, layers = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    heads, kv_heads, head_dim = _head_sizes(keys, kv_default, default_dim)
    trained_len = keys.integer("max_position_embeddings", "context_window_size")
    rope = rope or RopeDefaults()
    if theta is not None:
        rope = replace(rope, theta=theta)
    params, local_params = parse_rope(keys, trained_len, rope, head_dim)
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
        max_model_len=served_len(params, trained_len, stretch=not rope.local_theta),
        norm_eps=keys.number(eps_key, default=eps),
        activation=parse_activation(activation or keys.text("hidden_act", default="silu")),
        rope=params,
        local_rope=local_params,
        windows=_windows(keys, layers, window, pattern),
        query_scale=head_dim**-0.5 if query_scale is None else query_scale,
        **fields,
    )


def _head_sizes(keys: ConfigKeys, kv_default: int | None, default_dim: int | None) -> tuple[int, int, int]:
    """Return the number of heads, of K/V heads, and the size of a head, or raise ModelError."""
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    # A value of null means as many as heads; a missing field means the default of the family.
    if kv_default is None or keys.has("num_key_value_heads"):
        kv_default = heads
    kv_heads = keys.integer("num_key_value_heads", default=kv_default)
    head_dim = parse_head_dim(keys, hidden, heads, default_dim)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise keys.refuse("head_dim", "even, because rotary embeddings rotate halves of a head", head_dim)
    return heads, kv_heads, head_dim


def routing(
    keys: ConfigKeys, num_experts: int, top_k: int, groups: int = 1, top_groups: int = 1, **rule: Any
) -> Routing:
    """Build a routing rule; `rule` holds further fields of it.

    Raises:
        ModelError: if there are fewer experts, also in the groups to choose from, than a token needs.
    """
    if num_experts % groups or top_groups > groups:
        wanted = (
            f"a divisor of the {num_experts} experts, and topk_group {top_groups} must be at most n_group"
        )
        raise keys.refuse("n_group", wanted, groups)
    if top_k > (eligible := num_experts // groups * top_groups):
        raise keys.refuse("num_experts_per_tok", f"at most the number of experts, {eligible}", top_k)
    return Routing(num_experts=num_experts, top_k=top_k, groups=groups, top_groups=top_groups, **rule)


def corrected_routing(
    keys: ConfigKeys,
    experts: int | None = None,
    top_k: int | None = None,
    renormalises: bool = True,
) -> Routing:
    """Build a rule like DeepSeek-V3's: sigmoids with a correction, in the groups with the two largest scores.

    Args:
        keys: the config.
        experts, top_k: defaults of the numbers of experts; None: the config must have them.
        renormalises: default of `norm_topk_prob`.
    """
    return routing(
        keys,
        keys.integer("n_routed_experts", "num_local_experts", default=experts),
        keys.integer("num_experts_per_tok", default=top_k),
        keys.integer("n_group", default=1),
        keys.integer("topk_group", default=1),
        scores="sigmoid",
        correction=True,
        group_score="two_largest",
        renormalise=keys.flag("norm_topk_prob", default=renormalises),
        scale=keys.number("routed_scaling_factor", default=1.0),
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


def refuse_bidirectional(name: str, keys: ConfigKeys) -> None:
    """Raise ModelError if tokens attend to later ones."""
    if keys.flag("use_bidirectional_attention"):
        raise ModelError(f"{name} with use_bidirectional_attention is not supported")


def optional_window(keys: ConfigKeys, default: int | None = None) -> int | None:
    """Return the window in tokens, or None if the config turns it off with null or does not set it."""
    window = keys.get("sliding_window", "sliding_window_size", default=default)
    return None if window is None else keys.integer("sliding_window", "sliding_window_size", default=default)


def layer_flags(keys: ConfigKeys, name: str) -> tuple[bool, ...] | None:
    """Return a list with a 0 or 1 for each layer; None if the field is missing."""
    values, layers = keys.entries(name, int), keys.integer("num_hidden_layers")
    if values is not None and len(values) < layers:
        raise keys.refuse(name, f"a list of {layers} entries, one for each layer", values)
    return None if values is None else tuple(value != 0 for value in values[:layers])


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


def text_part(keys: ConfigKeys) -> ConfigKeys:
    """Return the config of the text part of a multimodal model, or the config itself if it has no such part.

    Facts that concern the whole checkpoint come from the outer config.
    """
    inner = keys.section("text_config")
    if not inner:
        return keys
    shared = (
        "torch_dtype", "dtype", "tie_word_embeddings", "quantization_config", "compression_config", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    outer = {name: keys.config[name] for name in shared if keys.config.get(name) is not None}
    return ConfigKeys({**inner, **outer}, keys.where)


def soft_cap(keys: ConfigKeys, name: str, default: float | None = None) -> float | None:
    """Return a soft cap, or None if the config turns it off with null or, without a `default`, does not set it."""
    if keys.get(name, default=None) is None and (default is None or keys.has(name)):
        return None
    return keys.number(name, default=default)
