"""The static scales of keys and values that a checkpoint stores, such as `k_scale` and `v_scale`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from quire.attention.entries import LEAST_SCALE
from quire.layers.env import Env
from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.models.spec import ModelSpec
from quire.types import ModelError

# Names of static scales behind the prefix of a layer's attention, in the formats that store them.
_NAMES = (
    "{}_scale",
    "{}_cache_scale",
    "{}_proj.{}_scale",
    "{}_proj.output_scale",
    "attn.{}_scale",
    "kv_scale",
)
_KEY_SCALE = re.compile(r"self_attn\.((k|k_cache|kv|k_proj\.k|attn\.k)_scale|k_proj\.output_scale)$")


def stores_kv_scales(path: Path) -> bool:
    """Return whether the checkpoint holds static scales of keys. Only folders of safetensors files do."""
    if not path.is_dir():
        return False
    checkpoint = SafetensorsCheckpoint(path, tied=False)
    try:
        return any(_KEY_SCALE.search(name) for name in checkpoint.where)
    finally:
        checkpoint.close()


def load_kv_scales(env: Env, spec: ModelSpec, prefix: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the static scales of a layer's keys and values, fp32 [kv heads of this rank], or None without them.

    A layer without a stored scale has scale 1.

    Args:
        prefix: of the layer's attention, such as `model.layers.0.self_attn.`.
    """
    if not (spec.kv_codes and spec.kv_codes.static):
        return None
    return _load_scale(env, spec, prefix, "k"), _load_scale(env, spec, prefix, "v")


def _load_scale(env: Env, spec: ModelSpec, prefix: str, letter: str) -> torch.Tensor:
    heads = spec.num_kv_heads
    name = next(
        (name for part in _NAMES if env.weights.has(name := prefix + part.format(letter, letter))), None
    )
    stored = env.weights.stored(name) if name else None
    if name is None or stored is None:
        scale = torch.ones(1)
    else:
        scale = env.weights.tensor(name, stored.shape).float().flatten()
    if not ((scale > LEAST_SCALE) & scale.isfinite()).all() or scale.numel() not in (1, heads):
        raise ModelError(
            f"{name} must be one finite positive number, or one for each of the {heads} KV heads, got {scale.tolist()[:4]}; "
            "use kv_cache_dtype auto"
        )
    return scale.expand(heads)[env.parallel.cut(heads)].to(env.device).contiguous()
