"""`parse_config`: from a Hugging Face `config.json` to a `ModelSpec`.

Old and new names of fields are accepted (`torch_dtype`/`dtype`, `rope_scaling`/`rope_parameters`, GPT-2's `n_embd`,
MLC's `sliding_window_size`). A missing field means the default of the model's configuration class in transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from quire.files.reading import shown
from quire.models.config.deepseek import parse_deepseek_v2, parse_deepseek_v3
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import (
    decoder_spec,
    optional_window,
    refuse_bias,
    routing,
    text_part,
)
from quire.models.config.refused import REASONS
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
    if reason := REASONS.get(name):
        raise ModelError(f"{name} is not supported: {reason}")
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


_FAMILIES: dict[Callable[[str, ConfigKeys], ModelSpec], tuple[str, ...]] = {
    _mixtral: ("MixtralForCausalLM", "MixtralModel", "mixtral"),
    parse_deepseek_v2: ("DeepseekV2ForCausalLM", "DeepseekV2Model", "deepseek_v2"),
    parse_deepseek_v3: (
        "DeepseekV3ForCausalLM", "DeepseekV3Model", "deepseek_v3", "KimiK2ForCausalLM", "kimi_k2",
    ),
    _qwen3_moe: ("Qwen3MoeForCausalLM", "Qwen3MoeModel", "qwen3_moe", "qwen3_vl_moe_text"),
}  # fmt: skip
# Keys are architectures, with and without a head, and values of model_type.
PARSERS = {name: parse for parse, names in _FAMILIES.items() for name in names}
