"""Parser of DeepSeek's `config.json`: V2, V3 and R1, and Kimi-K2, which has the architecture of V3."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.spec import LatentSpec, ModelSpec
from quire.types import ModelError


def parse_deepseek_v2(name: str, keys: ConfigKeys) -> ModelSpec:
    """Parse a DeepSeek-V2 config."""
    return _deepseek(name, keys, has_halves=False)


def parse_deepseek_v3(name: str, keys: ConfigKeys) -> ModelSpec:
    """Parse a config of DeepSeek-V3, R1 or Kimi-K2."""
    return _deepseek(name, keys, has_halves=not keys.flag("rope_interleave", default=True))


def _deepseek(name: str, keys: ConfigKeys, has_halves: bool) -> ModelSpec:
    if keys.flag("attention_bias"):
        raise ModelError(f"{name} with attention_bias is not supported")
    latent = LatentSpec(
        # null: queries are projected directly; a missing field means the default of transformers
        query_rank=None
        if keys.has("q_lora_rank") and keys.get("q_lora_rank", default=None) is None
        else keys.integer("q_lora_rank", default=1536),
        rank=keys.integer("kv_lora_rank", default=512),
        content_dim=keys.integer("qk_nope_head_dim", default=128),
        rotary_dim=keys.integer("qk_rope_head_dim", default=64),
        value_dim=keys.integer("v_head_dim", default=128),
        interleaved=not has_halves,
    )
    if latent.rotary_dim % 2:
        raise keys.refuse("qk_rope_head_dim", "even, because pairs are rotated", latent.rotary_dim)
    heads, head_dim = keys.integer("num_attention_heads"), latent.content_dim + latent.rotary_dim
    # head_dim and num_key_value_heads describe no tensor of these models, whatever a config says.
    keys = ConfigKeys({**keys.config, "head_dim": head_dim, "num_key_value_heads": heads}, keys.where)
    spec = decoder_spec(name, "deepseek", keys, query_scale=head_dim**-0.5 * _score_factor(keys))
    return replace(spec, latent=latent)


def _score_factor(keys: ConfigKeys) -> float:
    """Return the factor of the scores of a model with an extended context: (0.1 mscale_all_dim ln(factor) + 1)^2."""
    settings = ConfigKeys(keys.section("rope_parameters", "rope_scaling"), "rope parameters")
    if settings.text("rope_type", "type", default="default") == "default":
        return 1.0
    weight, factor = settings.number("mscale_all_dim", default=0), settings.number("factor", default=1.0)
    return (0.1 * weight * math.log(factor) + 1.0) ** 2
