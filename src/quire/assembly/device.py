"""The choice of a rank's device, and of the number format that it computes in."""

from __future__ import annotations

import logging

import torch

from quire.frontend.client.remote import meeting_host, own_address
from quire.kernels.target import OLDEST, target_of
from quire.models.spec import ModelSpec
from quire.parallel.connection import HostAddresses
from quire.types import ConfigError

log = logging.getLogger("quire")


def rank_device(name: str, rank: int, ranks: int) -> torch.device:
    """Return the device of a rank: the GPUs from the one called `name` on, or the CPU for all.

    Raises:
        ConfigError: as `pick_device`, or if there are fewer GPUs than ranks.
    """
    first = pick_device(name)
    if first.type == "cpu":
        return first
    begin, count = first.index or 0, torch.cuda.device_count()
    if begin + ranks > count:
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size is {ranks}, which needs GPUs {begin} to "
            f"{begin + ranks - 1}, but this machine has {count}, numbered from 0; lower one of them"
        )
    return first if rank == 0 else pick_device(f"cuda:{begin + rank}")


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first GPU, or the CPU where there is none, and `auto:N` GPU N.

    Raises:
        ConfigError: if there is no such device, or Quire does not support it.
    """
    kind, _, index = name.partition(":")
    if kind == "auto":
        name = f"cuda:{index or 0}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name!r} needs a CUDA GPU, but torch finds none; use device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {name!r} does not exist: this machine has {torch.cuda.device_count()} GPU(s), numbered from 0"
            )
        device = torch.device("cuda", device.index or 0)
        _refuse_unsupported(device)
        # cuDNN's attention spends some 50 ms on planning for every new length, and rows grow by one token a step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _refuse_unsupported(device: torch.device) -> None:
    if torch.version.hip is not None:  # torch calls AMD GPUs cuda as well
        raise ConfigError(
            f"device {str(device)!r} is an AMD GPU (ROCm {torch.version.hip}), which Quire does not support; "
            "use an NVIDIA GPU or device cpu"
        )
    target = target_of(device)
    if target.capability < OLDEST:
        raise ConfigError(
            f"{target} is too old: Quire needs compute capability {OLDEST // 10}.{OLDEST % 10} or later; "
            "use a newer GPU or device cpu"
        )


def pick_dtype(wanted: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the number format of weights and activations; `auto` follows the checkpoint if the device can.

    With `auto`, a GPU without bfloat16 uses float16, or float32 for models whose activations exceed the range of
    float16. A CPU has no fast path for float16 and uses float32, and so does one without AVX-512 for bfloat16.

    Raises:
        ConfigError: if `wanted` is bfloat16 and the device lacks it.
    """
    name = spec.dtype if wanted == "auto" else wanted
    if name == "bfloat16" and device.type == "cuda" and not (target := target_of(device)).has_bf16:
        instead = "float32" if spec.family in _WIDE_RANGE else "float16"
        if wanted == "bfloat16":
            raise ConfigError(
                f"dtype bfloat16 needs an NVIDIA GPU since Ampere, got {target}; use dtype {instead}"
            )
        log.warning("using dtype %s, because %s has no bfloat16", instead, target)
        name = instead
    if name == "float16" and spec.family in _WIDE_RANGE:
        log.warning("%s models exceed the range of float16; bfloat16 or float32 are safe", spec.family)
    if name == "bfloat16" and wanted == "auto" and device.type == "cpu" and not multiplies_bf16():
        name = "float32"
    if name == "float16" and device.type == "cpu":
        if wanted == "float16":
            log.warning("dtype float16 is slow on a CPU; bfloat16 and float32 are faster")
        else:
            name = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def multiplies_bf16() -> bool:
    """Return whether this CPU has fast products of bf16. Without AVX-512, those of fp32 are several times as fast."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


# Families trained in bfloat16 whose activations overflow float16.
_WIDE_RANGE = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4")


def host_addresses(rank_address: str | None) -> HostAddresses:
    """Return where ranks meet: on this host, or at the host of `rank_address`."""
    if rank_address is None:
        return HostAddresses()
    host = meeting_host(rank_address)
    return HostAddresses(host, own_address(host), one_host=False)
