"""Gemma 3n, text part."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.layers.rope_params import RopeParams
from quire.models.config.gemma import kv_sources, layer_kinds, layer_rope, with_defaults
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, refuse_bidirectional, soft_cap, text_part
from quire.models.families import Family, names
from quire.models.gemma_spec import GemmaSpec
from quire.models.spec import ModelSpec

_DEFAULTS = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 15,
}  # fmt: skip


def _sparsity(keys: ConfigKeys, layers: int) -> tuple[float, ...]:
    """Return the share of gates that each layer cuts: 0.95 in the first 10 layers of models with more."""
    name = "activation_sparsity_pattern"
    if isinstance(keys.get(name, default=None), list):
        values = keys.numbers(name)
    elif keys.get(name, default=None) is not None:
        values = (keys.number(name),) * layers
    else:
        values = ((0.95,) * 10 + (0.0,) * (layers - 10)) if layers > 10 else (0.0,) * layers
    if len(values) != layers:
        raise keys.refuse(name, f"a list of {layers} numbers, one for each layer", values)
    return values


def _widths(keys: ConfigKeys, layers: int) -> tuple[int, ...]:
    """Return the width of the MLP of each layer."""
    widths = keys.get("intermediate_size")
    widths = widths if isinstance(widths, list) else [widths] * layers
    if len(widths) != layers:
        raise keys.refuse("intermediate_size", f"a number, or a list of {layers} of them", widths)
    return tuple(ConfigKeys({"intermediate_size": width}).integer("intermediate_size") for width in widths)


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    keys = with_defaults(text_part(keys), _DEFAULTS)
    refuse_bidirectional(name, keys)
    kinds = layer_kinds(keys, 5)
    widths, bias = _widths(keys, len(kinds)), keys.flag("attention_bias")
    plain = {"rope_parameters": {}, "layer_types": kinds, "intermediate_size": widths[0]}
    streams = keys.integer("altup_num_inputs", default=4)
    active = keys.integer("altup_active_idx", default=0, minimum=0)
    if active >= streams:
        raise keys.refuse("altup_active_idx", f"below altup_num_inputs {streams}", active)
    spec = decoder_spec(
        name,
        "gemma3n",
        ConfigKeys({**keys.config, **plain}, keys.where),
        window=keys.integer("sliding_window"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        query_scale=1.0,
        embedding_scale=math.sqrt(keys.integer("hidden_size")),
        rounds_embedding_scale=True,
        activation=keys.text("hidden_activation", default="gelu_pytorch_tanh"),
        tie=True,
        final_soft_cap=soft_cap(keys, "final_logit_softcapping", 30.0),
        kv_sources=kv_sources(keys, kinds),
        mlp_sizes=widths,
        gemma=GemmaSpec(
            layer_width=keys.integer("hidden_size_per_layer_input", default=256),
            layer_vocab=keys.integer("vocab_size_per_layer_input"),
            streams=streams,
            active_stream=active,
            scales_correction=keys.flag("altup_correct_scale", default=True),
            laurel_rank=keys.integer("laurel_rank", default=64),
            sparsity=_sparsity(keys, len(kinds)),
        ),
    )
    full, local = (
        layer_rope(keys, kind, {"rope_theta": keys.get(old, default=theta)}).number("rope_theta")
        for kind, old, theta in (
            ("full_attention", "rope_theta", 1e6),
            ("sliding_attention", "rope_local_base_freq", 1e4),
        )
    )
    return replace(spec, rope=RopeParams(theta=full), local_rope=RopeParams(theta=local))


FAMILY = Family(
    title="Gemma 3n (text)",
    architectures=(
        *names("Gemma3n", "gemma3n_text"),
        "Gemma3nTextModel",
        "Gemma3nForConditionalGeneration",
        "gemma3n",
    ),
    parse=_parse,
    special="four residual streams, layers that share keys and values, an embedding per layer, sparse gates",
    gguf=("gemma3n",),
    heads=(),
)
