"""Norms and activations written out in basic operations, and the choice between them, PyTorch's and the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Which implementation norms and MLPs use.

    auto: the kernels of the device, fused with their neighbours where that is possible. library: PyTorch's functions.
    reference: basic operations, one after the other.
    """

    norm: str = "auto"
    mlp: str = "auto"


def rms_norm_written_out(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the RMS norm over the last dimension, times `weight`, in fp32 steps."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps)
        return (y * weight.float()).to(x.dtype)

    return norm


def layer_norm_written_out(
    weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the LayerNorm over the last dimension, in fp32 steps."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y - y.mean(-1, keepdim=True)
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps)
        return (y * weight.float() + bias.float()).to(x.dtype)

    return norm


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


WRITTEN_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
}


def gated_written_out(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return act(gate) * up of packed rows gate|up, where the activation `kind` is computed in fp32."""
    act = WRITTEN_OUT[kind]

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return act(gate.float()).to(gate.dtype) * up

    return gated
