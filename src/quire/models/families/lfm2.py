"""LFM2 (arXiv:2511.23404)."""

from __future__ import annotations

from typing import Any

from quire.layers.mixer_params import ShortConvParams
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec

NAMES = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "o_proj": "out_proj",
    "mixer": "conv",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
}


def attending(keys: ConfigKeys) -> tuple[bool, ...]:
    """Return, for each layer, whether it attends; the others convolve."""
    layers = keys.integer("num_hidden_layers")
    kinds = keys.entries("layer_types", str)
    if kinds is None:
        indices = keys.entries("full_attn_idxs", int)
        return tuple(indices is None or index in indices for index in range(layers))
    if len(kinds) != layers or set(kinds) - {"full_attention", "conv"}:
        raise keys.refuse("layer_types", f"full_attention or conv for each of {layers} layers", kinds)
    return tuple(kind == "full_attention" for kind in kinds)


def _intermediate(keys: ConfigKeys) -> int:
    """Return the width of the MLP, which the config gives before it is adjusted."""
    width = keys.integer("block_ff_dim", "intermediate_size", default=12288)
    if not keys.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    if keys.has("block_ffn_dim_multiplier") and keys.get("block_ffn_dim_multiplier", default=None) is None:
        return width
    multiple = keys.integer("block_multiple_of", default=256)
    scaled = int(keys.number("block_ffn_dim_multiplier", default=1.0) * width)
    return -(-scaled // multiple) * multiple


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    attends, width = attending(keys), _intermediate(keys)
    keys = ConfigKeys({**keys.config, "intermediate_size": width}, keys.where)
    return conv_decoder(name, keys, attends)


def conv_decoder(name: str, keys: ConfigKeys, attends: tuple[bool, ...], **fields: Any) -> ModelSpec:
    """Build the spec of a model that attends in some layers and convolves in the others."""
    mixer = ShortConvParams(
        channels=keys.integer("hidden_size", default=2560),
        width=keys.integer("conv_L_cache", default=3, minimum=2),
        bias=keys.flag("conv_bias"),
    )
    return decoder_spec(
        name,
        "hybrid",
        keys.without("layer_types"),
        kv_default=8,
        rope=RopeDefaults(theta=1e6),
        eps=1e-5,
        eps_key="norm_eps",
        activation="silu",
        tie=keys.flag("tie_embedding", default=True),
        qk_norm=True,
        names=NAMES,
        mixer=mixer,
        mixes=tuple(not each for each in attends),
        attends=attends,
        **fields,
    )


FAMILY = Family(
    title="LFM2",
    architectures=names("Lfm2", "lfm2"),
    parse=_parse,
    special="short convolutions with gates instead of attention in most layers",
    gguf=("lfm2",),
    tools="lfm2",
)
