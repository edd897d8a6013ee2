"""Sizes and options of mixers: layers that keep a fixed-size state per request instead of keys and values per token.

Plain data, without torch. models/config/ and the files of families parse it; layers/mixers/ computes it. Each record
says what a layer keeps of a request (`state_layout`), so layers and the sizing of memory use the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from quire.types import StateLayout, StateTensor


class MixerParams(Protocol):
    """The parameters of a model's mixers. All mixers of a model have the same."""

    def state_layout(self, dtype: str, ranks: int) -> StateLayout:
        """Return the state of a request in one layer, of one of `ranks` ranks; `dtype` is that of activations."""
        ...

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of one layer's matrices."""
        ...

    def sharded(self) -> dict[str, int]:
        """Return the sizes, by name, that must be multiples of the number of ranks."""
        ...


def _share(units: int, ranks: int) -> int:
    """Return the units that each rank holds, as `Parallel.share` does for sizes that it accepts."""
    return max(units // ranks, 1)


def _window(width: int, channels: int, dtype: str) -> StateTensor:
    """Return the last inputs of a causal convolution of `width` taps."""
    return StateTensor("window", (width - 1, channels), dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaParams:
    """The gated delta rule (Gated DeltaNet, arXiv:2412.06464), or Kimi delta attention if the gate is per channel.

    Attributes:
        key_heads: heads of queries and keys; each serves value_heads / key_heads consecutive value heads.
        value_heads: heads of values, and of the state.
        key_dim, value_dim: sizes of a head.
        width: taps of the convolution of queries, keys and values.
        stored: names and order of the projections: `grouped` by key head in two tensors (Qwen3-Next), `split` into
            four (Qwen3.5), or those of Kimi Linear.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    stored: Literal["grouped", "split", "kimi"]

    def state_layout(self, dtype: str, ranks: int) -> StateLayout:
        """Return the window of q|k|v and the matrices [value heads, key dim, value dim]."""
        keys, values = _share(self.key_heads, ranks), _share(self.value_heads, ranks)
        channels = 2 * keys * self.key_dim + values * self.value_dim
        matrix = StateTensor("matrix", (values, self.key_dim, self.value_dim), "float32")
        return StateLayout((_window(self.width, channels, dtype), matrix))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of one layer's matrices."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        if self.stored == "kimi":
            return hidden * (4 * values + self.value_heads) + 2 * self.key_dim * (hidden + values)
        return hidden * (2 * keys + 3 * values + 2 * self.value_heads)

    def sharded(self) -> dict[str, int]:
        """Return the sizes, by name, that must be multiples of the number of ranks."""
        return {"linear key heads": self.key_heads}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceParams:
    """Mamba-2 (arXiv:2405.21060).

    Attributes:
        heads, head_dim: heads of x, and of the state.
        groups: groups of heads that share B and C.
        state_dim: width of B and C.
        width: taps of the convolution of x, B and C.
        conv_bias, proj_bias, out_bias: whether these have biases.
        step_limits: smallest and largest time step.
        norm: gated RMS norm per group, behind the gate or in front of it; None: the gate alone.
        eps: epsilon of that norm.
        scales: factors of the projections of gate, x, B, C and time step (Falcon-H1).
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["behind", "front"] | None = "behind"
    eps: float = 1e-5
    scales: tuple[float, ...] = (1.0,) * 5

    @property
    def inner(self) -> int:
        """Width of x."""
        return self.heads * self.head_dim

    def state_layout(self, dtype: str, ranks: int) -> StateLayout:
        """Return the window of x|B|C and the matrices [heads, state dim, head dim]."""
        heads, groups = _share(self.heads, ranks), _share(self.groups, ranks)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        matrix = StateTensor("matrix", (heads, self.state_dim, self.head_dim), "float32")
        return StateLayout((_window(self.width, channels, dtype), matrix))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of one layer's matrices."""
        return hidden * (3 * self.inner + 2 * self.groups * self.state_dim + self.heads)

    def sharded(self) -> dict[str, int]:
        """Return the sizes, by name, that must be multiples of the number of ranks."""
        return {"state space heads": self.heads}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScanParams:
    """Mamba-1 (arXiv:2312.00752) with Jamba's norms of time step, B and C.

    Attributes:
        inner: channels of x.
        state_dim: width of B and C.
        rank: width of the time step before its projection.
        width: taps of the convolution of x.
        conv_bias, proj_bias: whether the convolution, and the projections in front and at the end, have biases.
    """

    inner: int
    state_dim: int
    rank: int
    width: int
    conv_bias: bool = True
    proj_bias: bool = False

    def state_layout(self, dtype: str, ranks: int) -> StateLayout:
        """Return the window of x and the state [channels, state dim]."""
        channels = _share(self.inner, ranks)
        state = StateTensor("matrix", (channels, self.state_dim), "float32")
        return StateLayout((_window(self.width, channels, dtype), state))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of one layer's matrices."""
        return self.inner * (3 * hidden + 2 * self.rank + 2 * self.state_dim)

    def sharded(self) -> dict[str, int]:
        """Return the sizes, by name, that must be multiples of the number of ranks."""
        return {"state space channels": self.inner}


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningParams:
    """Lightning attention (arXiv:2401.04658): linear attention with a fixed decay per head.

    Attributes:
        heads, head_dim: heads of queries, keys and values.
        eps: epsilon of the norm of the result.
    """

    heads: int
    head_dim: int
    eps: float = 1e-6

    def state_layout(self, dtype: str, ranks: int) -> StateLayout:
        """Return the matrices [heads, head dim, head dim]."""
        shape = (_share(self.heads, ranks), self.head_dim, self.head_dim)
        return StateLayout((StateTensor("matrix", shape, "float32"),))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of one layer's matrices."""
        return 5 * hidden * self.heads * self.head_dim

    def sharded(self) -> dict[str, int]:
        """Return the sizes, by name, that must be multiples of the number of ranks."""
        return {"linear attention heads": self.heads}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvParams:
    """The gated short convolution of LFM2 (arXiv:2511.23404).

    Attributes:
        channels: its width, that of the residual stream.
        width: taps of the convolution.
        bias: whether the convolution and the projections have biases.
    """

    channels: int
    width: int
    bias: bool = False

    def state_layout(self, dtype: str, ranks: int) -> StateLayout:
        """Return the window of the gated inputs."""
        return StateLayout((_window(self.width, _share(self.channels, ranks), dtype),))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of one layer's matrices."""
        return 4 * hidden * self.channels

    def sharded(self) -> dict[str, int]:
        """Return the sizes, by name, that must be multiples of the number of ranks."""
        return {"convolution channels": self.channels}
