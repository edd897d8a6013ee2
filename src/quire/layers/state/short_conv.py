"""The gated short convolution of LFM2 (arXiv:2511.23404)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.state.rows import StateRows
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mixer_params import ShortConvParams
from quire.layers.state.mixer import MixerPlace, StateMixer, load_taps
from quire.layers.state.ops import pick_ops


class ShortConvolution(StateMixer):
    """c * convolution(b * x), where b, c and x are projections of the input."""

    def __init__(self, env: Env, params: ShortConvParams, place: MixerPlace) -> None:
        prefix, channels, bias = place.prefix, params.channels, params.bias
        self.ops = pick_ops(env)
        project = Linear(env, prefix + "in_proj", place.hidden, [channels] * 3, bias, cut="rows")
        output = Linear(env, prefix + "out_proj", channels, place.hidden, bias, cut="cols")
        super().__init__(place, project, [project.out_features // 3] * 3, output)
        self.taps, self.bias = load_taps(env, prefix + "conv", params.width, [channels], [channels], bias)

    def mix(
        self, parts: Sequence[torch.Tensor], state: tuple[torch.Tensor, ...], rows: StateRows
    ) -> torch.Tensor:
        before, after, x = parts
        return after * self.ops.conv(before * x, self.taps, self.bias, state[0], rows)
