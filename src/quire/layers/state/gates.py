"""Gates of delta-rule layers and the norm behind them, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log decays -rate * softplus(a + bias) and the rates sigmoid(b) of the delta rule.

    Args:
        a: [tokens, channels], one channel per head, or as many as the key dim.
        b: [tokens, heads].
        rate: float32 [heads], positive.
        bias: float32 [channels].

    Returns:
        float32 [tokens, channels] and float32 [tokens, heads].
    """
    step = F.softplus(a.float() + bias)
    return -rate.repeat_interleave(a.shape[1] // len(rate)) * step, b.float().sigmoid()


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str = "silu"
) -> torch.Tensor:
    """Return the RMS norm of x over the last dimension, times the activated gate.

    Args:
        x: [tokens, heads, width].
        gate: [tokens, heads, width].
        weight: float32 [width].
        eps: epsilon of the norm.
        activation: silu or sigmoid.
    """
    normed = F.rms_norm(x.float(), weight.shape, weight, eps)
    gate = gate.float()
    return (normed * (F.silu(gate) if activation == "silu" else torch.sigmoid(gate))).to(x.dtype)
