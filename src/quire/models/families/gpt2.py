"""GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import common_fields, parse_activation, parse_head_dim
from quire.models.families import Family
from quire.models.spec import ModelSpec
from quire.types import ModelError


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
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


FAMILY = Family(
    title="GPT-2",
    architectures=("GPT2LMHeadModel", "GPT2Model", "gpt2"),
    parse=_parse,
    special="learned positions, LayerNorm, an MLP without gate, biases",
    gguf=("gpt2",),
    heads=(),
)
