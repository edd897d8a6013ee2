"""The format of KV entries: what a setting means for a model, and the scales that its checkpoint stores for it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from quire.attention.entries import LEAST_SCALE
from quire.kernels.target import target_of
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import SafetensorsCheckpoint
from quire.models.spec import ModelSpec
from quire.types import CODE_DTYPES, ConfigError, KVCodes, ModelError

# Names of static scales behind the prefix of a layer's attention, in the formats that store them.
_NAMES = ("{}_scale", "{}_cache_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "attn.{}_scale", "kv_scale")
_KEY_SCALE = re.compile(r"self_attn\.((k|k_cache|kv|k_proj\.k|attn\.k)_scale|k_proj\.output_scale)$")


def with_kv_codes(
    spec: ModelSpec, wanted: str, path: Path | None, dtype: torch.dtype, device: torch.device
) -> ModelSpec:
    """Return the spec with the format of KV entries that the setting `kv_cache_dtype` asks for.

    Args:
        spec: the model's spec.
        wanted: the setting.
        path: folder or file of the model; None if its weights are random.
        dtype: of activations.
        device: where the model runs.

    Raises:
        ConfigError: if the model or the device does not support it.
    """
    if wanted == "bfloat16" and dtype != torch.bfloat16:
        raise ConfigError(
            f"kv_cache_dtype bfloat16 needs dtype bfloat16, but activations are {str(dtype)[6:]}; use kv_cache_dtype auto"
        )
    if wanted in ("auto", "bfloat16"):
        return spec
    if spec.latent:
        raise ConfigError(
            f"kv_cache_dtype {wanted} needs keys and values of heads, but {spec.architecture} keeps one latent per "
            "token, which is small already; use kv_cache_dtype auto"
        )
    codes = CODE_DTYPES[wanted]
    is_fp8 = codes == CODE_DTYPES["fp8"]
    if is_fp8 and device.type == "cuda" and not (target := target_of(device)).has_fp8:
        raise ConfigError(f"kv_cache_dtype fp8 needs an NVIDIA GPU since Ada, got {target}; use kv_cache_dtype int8")
    return replace(spec, kv_codes=KVCodes(codes, is_fp8 and path is not None and stores_kv_scales(path)))


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
    name = next((name for part in _NAMES if env.weights.has(name := prefix + part.format(letter, letter))), None)
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
