"""Feed-forward layers: the gated MLP of Llama-like models, and the plain one with a single projection in front."""

from __future__ import annotations

import torch

from quire.kernels import Kernels
from quire.layers.activation import ACTIVATIONS, FUSED_ACTIVATIONS, Activation
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.written_out import WRITTEN_OUT, gated_written_out

CLAMPED_SWIGLU = "clamped_swiglu"  # of gpt-oss; its constants are not parameters of any checkpoint
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def gated(activation: str, kernels: Kernels | None) -> Activation:
    """Return the function act(gate) * up, from packed rows gate|up [rows, 2 * width] to [rows, width].

    Args:
        activation: key of `ACTIVATIONS`, or clamped_swiglu, which also clamps `up` and adds 1 to it.
        kernels: the kernels to use; None: plain PyTorch.
    """
    if activation == CLAMPED_SWIGLU:
        return clamped_swiglu
    if kernels and activation in FUSED_ACTIVATIONS:
        return lambda gate_up: kernels.gated(gate_up, activation)
    act = ACTIVATIONS[activation]

    def plain(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return act(gate) * up

    return plain


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up within 7 of 0 (gpt-oss)."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


class GatedMLP:
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202), with gate and up as one product."""

    def __init__(
        self,
        env: Env,
        prefix: str,
        hidden: int,
        intermediate: int,
        activation: str,
        bias: bool = False,
        stored: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """Load the weights `stored` under these names: gate, up and down, or gate and up as one tensor and down."""
        names, basic = [prefix + name for name in stored[:-1]], env.parts.mlp == "reference"
        env = env.for_mlp()
        self.gate_up = Linear(env, names, hidden, [intermediate, intermediate], bias, cut="rows")
        self.down = Linear(env, prefix + stored[-1], intermediate, hidden, bias, cut="cols")
        self.kind = activation
        self.activation = (
            gated_written_out(activation)
            if basic and activation in WRITTEN_OUT
            else gated(activation, env.kernels)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate_up(x)))


class PlainMLP:
    """project(act(expand(x))). `names` are those of the two projections; `transposed` as in `Linear`."""

    def __init__(
        self,
        env: Env,
        names: tuple[str, str],
        hidden: int,
        intermediate: int,
        activation: Activation,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        expand, project = names
        env = env.for_mlp()
        self.expand = Linear(env, expand, hidden, intermediate, bias, cut="rows", transposed=transposed)
        self.project = Linear(env, project, intermediate, hidden, bias, cut="cols", transposed=transposed)
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.activation(self.expand(x)))
