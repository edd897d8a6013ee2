"""Activations of feed-forward layers by name: plain functions of PyTorch, and xIELU, which has weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels import available
from quire.layers.env import Env

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu2,
}
FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # those that kernels of gated MLPs have


class XIELU:
    """A square above 0 and an exponential below, with trained slopes (arXiv:2411.13010)."""

    def __init__(self, env: Env, prefix: str) -> None:
        positive, negative = (env.weights.tensor(prefix + name, (1,)) for name in ("alpha_p", "alpha_n"))
        beta, eps = (env.weights.tensor(prefix + name, ()) for name in ("beta", "eps"))
        self.beta, self.eps = float(beta), float(eps)
        self.above = float(F.softplus(positive))
        self.below = self.beta + float(F.softplus(negative))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        above = self.above * x * x + self.beta * x
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * self.below + self.beta * x
        return torch.where(x > 0, above, below)


def make_activation(env: Env, prefix: str, name: str) -> Activation:
    """Return the activation `name`; the weights of one that has some begin with `prefix`."""
    return XIELU(env, prefix) if name == "xielu" else ACTIVATIONS[name]


def pick_gate(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function x * sigmoid(gate) of tensors [tokens, width], as one kernel on a GPU."""
    if not available(device):
        return lambda x, gate: x * gate.sigmoid()
    from quire.kernels.open_gate import open_gate

    return open_gate


# From x and gate [tokens, width] and whether scales go by column to e4m3 [tokens, width] and scales.
RoundedGate = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]


def pick_rounded_gate(device: torch.device) -> RoundedGate | None:
    """Return the function of `pick_gate` that rounds its result for an FP8 product; None without kernels."""
    if not available(device):
        return None
    from quire.kernels.open_gate import open_gate_rounded

    return open_gate_rounded
