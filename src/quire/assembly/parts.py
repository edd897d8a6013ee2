"""The back ends by part: prefill attention, decode attention, norms and MLPs, each chosen by a setting."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from quire.assembly.attention import pick_attention
from quire.assembly.latents import expansion_rule, with_expansion
from quire.attention.base import AttentionBackend
from quire.attention.by_rows import ByRowsAttention
from quire.attention.cpu import CpuAttention
from quire.attention.expansion_rule import NO_EXPANSION, ExpansionRule
from quire.attention.reference import ReferenceAttention
from quire.config import EngineConfig
from quire.config_rules import LatentPrefill
from quire.kernels import Kernels
from quire.layers.written_out import LayerParts
from quire.models.spec import ModelSpec
from quire.types import ConfigError


def pick_attention_parts(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kernels: Kernels | None
) -> AttentionBackend:
    """Return the attention back end that the settings ask for; one for both kinds of rows is that back end itself.

    With latent attention it is wrapped, if rows of prompts may expand latents (attention/expanding.py).

    Args:
        config: settings.
        spec: the model.
        device: where the model runs.
        dtype: of its activations.
        kernels: the set that the model's layers use, or None.

    Raises:
        ConfigError: if a back end cannot run here, or two of them cannot share the KV cache.
    """
    prefill = config.prefill_attention
    if prefill in get_args(LatentPrefill):
        config = replace(config, prefill_attention="auto")
    elif prefill != "auto" or spec.latent is None:
        return _pick_by_rows(config, spec, device, dtype, kernels)
    stored = _pick_by_rows(config, spec, device, dtype, kernels)
    return with_expansion(stored, prefill, spec, device, dtype, config.tensor_parallel_size)


def prefill_rule(config: EngineConfig, spec: ModelSpec, device: torch.device) -> ExpansionRule:
    """Return which rows expand latents in the back end that `pick_attention_parts` returns."""
    way = config.prefill_attention
    if spec.latent is None or way not in ("auto", *get_args(LatentPrefill)):
        return NO_EXPANSION
    return expansion_rule(way, spec, device, config.tensor_parallel_size)


def _pick_by_rows(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kernels: Kernels | None
) -> AttentionBackend:
    """Return the back end, or the two by number of new tokens, of keys and values as they are stored."""
    whole = pick_attention(config.attention, spec, device, dtype, kernels)
    if config.decode_splits is not None:
        whole = _with_splits(whole, config.decode_splits)
    prefill, decode = config.prefill_attention, config.decode_attention
    if prefill == decode == "auto":
        return whole
    chosen = [whole.name if name == "auto" else name for name in (prefill, decode)]
    if isinstance(whole, CpuAttention) and chosen[0] == "cpu":
        chosen[0] = "reference"  # the C kernel runs rows of one token; the others are the reference's
    if "cpu" in chosen:
        if chosen != ["reference", "cpu"]:
            raise ConfigError(
                f"decode_attention cpu needs prefill_attention reference, got {chosen[0]}; both share the KV cache"
            )
        return pick_attention("cpu", spec, device, dtype, kernels)
    if chosen == ["reference", "reference"]:
        return ReferenceAttention()
    _check_parts(chosen, spec, device, dtype)
    head_axis = 1 if "triton" in chosen else 2
    parts = {name: _part(name, head_axis, config, spec, device, dtype, kernels) for name in chosen}
    return parts[chosen[0]] if len(parts) == 1 else ByRowsAttention(parts[chosen[0]], parts[chosen[1]])


def _check_parts(chosen: list[str], spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if back ends other than one kernel for all rows cannot compute the model."""
    asked = f"prefill_attention {chosen[0]} and decode_attention {chosen[1]}"
    if chosen == ["triton", "triton"]:
        return
    if spec.latent:
        raise ConfigError(f"{asked} need keys and values of heads, but {spec.architecture} keeps latents")
    if spec.kv_codes:
        raise ConfigError(f"{asked} read plain keys and values; use kv_cache_dtype auto")
    if "library" not in chosen:
        return
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            "attention library needs a CUDA device and 16 bits; on a CPU reference already runs PyTorch's attention"
        )
    widest = max(spec.layer_head_dim(i) for i in range(spec.num_layers))
    if spec.attn_soft_cap or spec.sinks or spec.chunked_windows or widest > 256:
        raise ConfigError(
            f"attention library has no soft cap, sinks, chunked windows or heads above 256, which {spec.architecture} "
            "needs; use reference"
        )


def _part(
    name: str,
    head_axis: int,
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels | None,
) -> AttentionBackend:
    if name == "reference":
        return ReferenceAttention(head_axis)
    if name == "library":
        from quire.attention.library import LibraryAttention

        return LibraryAttention(head_axis)
    backend = pick_attention("triton", spec, device, dtype, kernels)
    return backend if config.decode_splits is None else _with_splits(backend, config.decode_splits)


def _with_splits(backend: AttentionBackend, most: int) -> AttentionBackend:
    """Return the back end with at most `most` programs for the context of a decoding row."""
    if backend.name != "triton":
        raise ConfigError(f"decode_splits is of attention triton, but attention is {backend.name}")
    from quire.attention.triton import TritonAttention

    return TritonAttention(most)


def layer_parts(config: EngineConfig) -> LayerParts:
    """Return which implementation norms and MLPs use."""
    return LayerParts(config.norm_backend, config.mlp_backend)
