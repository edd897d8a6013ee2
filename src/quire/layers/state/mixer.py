"""`StateMixer`: the first half of a layer that keeps a state per request, in place of attention.

A mixer projects its input, mixes tokens through its state, and projects the result back to the residual stream.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention.base import ForwardBatch
from quire.kernels.state.rows import StateRows
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.residual import ResidualAdd, ResidualNorm, SplitProjection, Stream
from quire.layers.rope import Rotation
from quire.quant.base import RoundedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerPlace:
    """Where a mixer is: its layer, the norm in front of it, and how its result joins the residual stream.

    Attributes:
        index: index of the layer.
        is_last: whether it is the last layer, which continues with the wanted tokens alone.
        prefix: prefix of the mixer's tensors.
        hidden: width of the residual stream.
        eps: epsilon of the mixer's norms.
        norm: the norm in front.
        adds: see `ResidualAdd`.
    """

    index: int
    is_last: bool
    prefix: str
    hidden: int
    eps: float
    norm: ResidualNorm
    adds: bool = True


class StateMixer:
    """A mixer between its two projections; subclasses compute `mix`."""

    attention = None  # it keeps no keys and values

    def __init__(self, place: MixerPlace, project: Linear, sizes: list[int], output: Linear) -> None:
        """Put the two projections around `mix`, which takes the outputs of the first in parts of these `sizes`."""
        self.index, self.is_last = place.index, place.is_last
        self.project = SplitProjection(place.norm, project, sizes)
        self.output = ResidualAdd(output, place.adds)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation | None, batch: ForwardBatch
    ) -> Stream:
        parts, residual = self.project(x, residual)
        mixed = self.mix(parts, batch.states[self.index], StateRows.of(batch))
        if isinstance(mixed, RoundedRows):
            return self.output.of_rounded(mixed, residual)
        if self.is_last:
            assert residual is not None  # the norm in front returned one
            mixed, residual = batch.narrow(mixed, residual)
        return self.output(mixed, residual)

    @abstractmethod
    def mix(
        self, parts: Sequence[torch.Tensor], state: tuple[torch.Tensor, ...], rows: StateRows
    ) -> torch.Tensor | RoundedRows:
        """Return the input of the output projection, [tokens, width]; updates `state`.

        It may be rounded if the projection has a `scale_order`, and the layer is not the last one.

        Args:
            parts: outputs of the first projection, [tokens, size] each, with contiguous rows.
            state: of this layer, of all requests.
            rows: the states that the tokens continue.
        """


def load_fp32(env: Env, name: str, length: int, units: int | None = None) -> torch.Tensor:
    """Load this rank's part of the vector `name`, in fp32; `units` parts of it stay whole."""
    part = env.weights.tensor(name, (length,), env.parallel.cut(length, units))
    return part.to(env.device, torch.float32)


def load_taps(
    env: Env, name: str, width: int, channels: list[int], units: list[int], bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Load a depthwise convolution over consecutive groups of channels, each cut into its own units.

    Returns:
        Taps [width, channels] and the bias [channels], or None, of this rank and in fp32.
    """
    total, first = sum(channels), 0
    taps, biases = [], []
    for count, parts in zip(channels, units):
        cut = env.parallel.cut(count, parts)
        rows = slice(first + cut.start, first + cut.stop)
        taps.append(env.weights.tensor(name + ".weight", (total, 1, width), rows)[:, 0])
        if bias:
            biases.append(env.weights.tensor(name + ".bias", (total,), rows))
        first += count
    weight = torch.cat(taps).t().to(env.device, torch.float32).contiguous()
    return weight, torch.cat(biases).to(env.device, torch.float32) if bias else None
