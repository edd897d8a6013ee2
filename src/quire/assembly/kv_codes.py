"""The format of KV entries that a model is served with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from quire.config import EngineConfig
from quire.kernels.target import target_of
from quire.models.kv_scales import stores_kv_scales
from quire.models.spec import ModelSpec
from quire.types import CODE_DTYPES, ConfigError, KVCodes


def kv_coded_spec(
    config: EngineConfig, path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> ModelSpec:
    """Return the spec with the format of KV entries that `config.kv_cache_dtype` asks for.

    Args:
        config: settings.
        path: folder or file of the model.
        spec: the model's spec.
        dtype: of activations.
        device: where the model runs.

    Raises:
        ConfigError: if the model or the device does not support it.
    """
    wanted = config.kv_cache_dtype
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
    if codes == "int8":
        return replace(spec, kv_codes=KVCodes(codes))
    if device.type == "cuda" and not (target := target_of(device)).has_fp8:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs an NVIDIA GPU since Ada, got {target}; use kv_cache_dtype int8"
        )
    static = config.load_format != "dummy" and spec.gemma is None and stores_kv_scales(path)
    return replace(spec, kv_codes=KVCodes(codes, static))
