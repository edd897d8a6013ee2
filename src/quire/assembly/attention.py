"""The choice of the attention back end."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from quire.attention.base import AttentionBackend
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.config import triton_interpreted
from quire.kernels import Kernels
from quire.kernels.cpu.ops import CpuKernels
from quire.kernels.target import target_of
from quire.models.spec import ModelSpec
from quire.types import ConfigError

log = logging.getLogger("quire")


def pick_attention(
    name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kernels: Kernels | None
) -> AttentionBackend:
    """Return the attention back end called `name`; `auto` picks the fastest one.

    That is `triton` on a GPU, if the package is installed and the heads fit into shared memory, and `cpu` on a CPU with
    C kernels. Otherwise it is `reference`, which is plain PyTorch.

    Args:
        kernels: the set that the model's layers use, or None.

    Raises:
        ConfigError: if the back end cannot run here.
    """
    if isinstance(kernels, CpuKernels) and name in ("auto", "cpu"):
        return CpuAttention(kernels)
    if name == "cpu":
        raise ConfigError(
            "attention cpu needs a CPU, dtype float32 or bfloat16, cpu_kernels on, and a C compiler; use attention reference"
        )
    installed = find_spec("triton") is not None
    if name == "reference" or (name == "auto" and not (installed and device.type == "cuda")):
        return ReferenceAttention()
    if not installed:
        raise ConfigError(
            "attention triton needs the package triton, which is not installed; use attention reference"
        )
    if device.type != "cuda" and not triton_interpreted():
        raise ConfigError(
            f"attention triton needs a CUDA device, but device is {device}; use attention reference"
        )
    # Imported here: an installation for CPUs has no Triton.
    from quire.attention.triton import TritonAttention

    target, latent = target_of(device), spec.latent
    if latent:
        width = latent.stored_dim
        fits = TritonAttention.fits_latent(spec.num_heads, width, dtype.itemsize, target)
    else:
        layers = range(spec.num_layers)
        kinds = {(spec.layer_head_dim(i), spec.num_heads // spec.layer_kv_heads(i)) for i in layers}
        width = max(dim for dim, _ in kinds)
        fits = all(TritonAttention.fits(dim, dtype.itemsize, group, target) for dim, group in kinds)
    if not fits:
        fault = f"{dtype.itemsize * 8}-bit heads of {width} need more shared memory than {target} has"
        if name == "triton":
            raise ConfigError(f"attention triton cannot run: {fault}; use attention reference")
        log.warning("using attention reference, which is slower: %s", fault)
        return ReferenceAttention()
    return TritonAttention()
