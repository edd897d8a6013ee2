"""`StateOps`: the functions that mixers call, for the device of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.kernels import available
from quire.layers.env import Env
from quire.layers.state.conv import causal_conv
from quire.layers.state.recurrence import recurrence
from quire.layers.state.selective_scan import selective_scan


@dataclass(frozen=True, slots=True)
class StateOps:
    """Functions of ragged batches. The plain ones define what each computes."""

    conv: Callable[..., torch.Tensor] = causal_conv
    recurrence: Callable[..., torch.Tensor] = recurrence
    scan: Callable[..., torch.Tensor] = selective_scan


def pick_ops(env: Env) -> StateOps:
    """Return the fastest functions on the device of `env`."""
    if not available(env.device):
        return StateOps()
    from quire.kernels.state import conv, recurrence, selective_scan

    return StateOps(conv.causal_conv, recurrence.recurrence, selective_scan.selective_scan)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str = "silu"
) -> torch.Tensor:
    """Return the RMS norm of x over the last dimension, times the activated gate; both [..., width], weight [width]."""
    normed = F.rms_norm(x.float(), weight.shape, weight, eps)
    gate = gate.float()
    return (normed * (F.silu(gate) if activation == "silu" else torch.sigmoid(gate))).to(x.dtype)
