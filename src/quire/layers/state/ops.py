"""`StateOps`: the functions that mixers call, for the device of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.kernels import available
from quire.kernels.state.rows import StateRows
from quire.layers.env import Env
from quire.layers.state.conv import causal_conv
from quire.layers.state.gates import delta_gates, gated_norm
from quire.layers.state.recurrence import recurrence
from quire.layers.state.selective_scan import selective_scan


class FusedStep(Protocol):
    """All operations of a layer between its projections, for some kinds of rows (kernels/state/delta_step.py)."""

    def takes(self, rows: StateRows) -> bool:
        """Return whether these rows can be run."""
        ...

    def __call__(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        window: torch.Tensor,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Advance the states of the rows, and return the input of the output projection."""
        ...


def _no_step(*layer: Any) -> None:
    """Return None: the operations of a layer run one by one."""
    return None


def _no_rounded_norm(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError  # no product on a CPU has a `scale_order`


@dataclass(frozen=True, slots=True)
class StateOps:
    """Functions of ragged batches. The plain ones define what each computes."""

    conv: Callable[..., torch.Tensor] = causal_conv
    recurrence: Callable[..., torch.Tensor] = recurrence
    scan: Callable[..., torch.Tensor] = selective_scan
    gates: Callable[..., tuple[torch.Tensor, torch.Tensor]] = delta_gates
    gated_norm: Callable[..., torch.Tensor] = gated_norm
    # The same, rounded for an FP8 product; kernels only.
    rounded_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _no_rounded_norm
    delta_step: Callable[..., FusedStep | None] = _no_step  # from the parameters of a gated delta layer


def pick_ops(env: Env) -> StateOps:
    """Return the fastest functions on the device of `env`."""
    if not available(env.device):
        return StateOps()
    from quire.kernels.state import conv, delta_step, gates, recurrence, selective_scan

    return StateOps(
        conv.causal_conv,
        recurrence.recurrence,
        selective_scan.selective_scan,
        gates.delta_gates,
        gates.gated_norm,
        gates.rounded_norm,
        delta_step.make_delta_step,
    )
