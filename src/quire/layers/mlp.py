"""Feed-forward layers: the gated MLP of Llama-like models, and the plain one of GPT-2."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels import Kernels
from quire.layers.env import Env
from quire.layers.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu}


def gated(activation: str, kernels: Kernels | None) -> Activation:
    """Return the function act(gate) * up, from packed rows gate|up [rows, 2 * width] to [rows, width]."""
    if kernels:
        return lambda gate_up: kernels.gated(gate_up, activation)
    act = ACTIVATIONS[activation]

    def plain(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return act(gate) * up

    return plain


class GatedMLP:
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202), with gate and up as one product."""

    def __init__(
        self, env: Env, prefix: str, hidden: int, intermediate: int, activation: str, bias: bool = False
    ) -> None:
        names = [prefix + "gate_proj", prefix + "up_proj"]
        self.gate_up = Linear(env, names, hidden, [intermediate, intermediate], bias, cut="rows")
        self.down = Linear(env, prefix + "down_proj", intermediate, hidden, bias, cut="cols")
        self.kind, self.activation = activation, gated(activation, env.kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate_up(x)))


class PlainMLP:
    """project(act(expand(x))), with the names and layout of GPT-2's Conv1D."""

    def __init__(self, env: Env, prefix: str, hidden: int, intermediate: int, activation: str) -> None:
        self.expand = Linear(env, prefix + "c_fc", hidden, intermediate, True, cut="rows", transposed=True)
        self.project = Linear(env, prefix + "c_proj", intermediate, hidden, True, cut="cols", transposed=True)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.activation(self.expand(x)))
