"""gpt-oss-20b and 120b (arXiv:2508.10925)."""

from __future__ import annotations

from quire.layers.routing_params import Routing
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec, MoESpec
from quire.types import ModelError

_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    for field, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if keys.number(field, default=value) != value:
            raise ModelError(f"{name} with {field} other than {value} is not supported")
    keys = ConfigKeys({**keys.config}, keys.where)
    if not keys.has("dtype", "torch_dtype"):
        keys.config["dtype"] = "bfloat16"  # what is not packed in published checkpoints
    if not keys.section("rope_parameters", "rope_scaling"):
        keys.config["rope_parameters"] = _ROPE
    layers = keys.integer("num_hidden_layers")
    experts = keys.integer("num_local_experts", "num_experts", default=128)
    top_k = keys.integer("num_experts_per_tok", "experts_per_token", default=4)
    if top_k > experts:
        raise keys.refuse("num_experts_per_tok", f"at most the number of experts, {experts}", top_k)
    bias = keys.flag("attention_bias", default=True)
    return decoder_spec(
        name,
        "gpt_oss",
        keys,
        window=keys.integer("sliding_window", default=128),
        pattern=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        default_dim=64,
        kv_default=8,
        eps=1e-5,
        rope=RopeDefaults(theta=150000.0),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        moe=MoESpec(
            routing=Routing(num_experts=experts, top_k=top_k, renormalise=True, bias=True),
            intermediate_size=keys.integer("intermediate_size"),
            sparse=(True,) * layers,
        ),
    )


FAMILY = Family(
    title="gpt-oss",
    architectures=names("GptOss", "gpt_oss"),
    parse=_parse,
    special="attention sinks, alternating windows, YaRN, experts with biases and clamped SwiGLU",
    gguf=("gpt-oss",),
    tools="gpt_oss",
    reasoning="gpt_oss",
)
