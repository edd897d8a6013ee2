"""Python interface of experts.c: the rule of a router, and the products of the chosen experts."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from quire.kernels.cpu.ops import KINDS, CFunction, CpuKernels, compare_layout, half, pointer

# Activations of experts: those of dense layers, and two more.
EXPERT_KINDS = KINDS | {"clamped_swiglu": 8, "relu2": 9}
SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_P, _N, _I = c_void_p, c_int64, c_int32


class CRoute(ctypes.Structure):
    _fields_ = [
        ("logits", _P), ("correction", _P), ("ids", _P), ("weights", _P),
        ("rows", _N), ("experts", _N), ("top_k", _N), ("groups", _N), ("top_groups", _N), ("summed", _N),
        ("scale", c_float), ("jitter", c_float), ("scores", _I), ("renormalise", _I), ("failed", _I),
    ]  # fmt: skip


class CExperts(ctypes.Structure):
    _fields_ = [
        ("up", _P), ("down", _P), ("x", _P), ("ids", _P), ("shares", _P), ("y", _P),
        ("rows", _N), ("top_k", _N), ("experts", _N), ("first", _N),
        ("coded", _I), ("half", _I), ("kind", _I), ("gated", _I), ("failed", _I),
    ]  # fmt: skip


class CShared(ctypes.Structure):
    _fields_ = [
        ("x", _P), ("shared", _P), ("gate", _P), ("y", _P), ("rows", _N), ("width", _N), ("half", _I), ("failed", _I),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RuleOfRouter:
    """The constants of a router's rule; the fields are those of `Routing` in layers/routing_params.py."""

    top_k: int
    scores: str
    renormalise: bool
    scale: float
    jitter: float
    groups: int
    top_groups: int
    two_largest: bool


class ExpertFunctions:
    """The functions of experts.c."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels, library = kernels, kernels.library
        compare_layout(library.experts_layout, (CRoute, CExperts, CShared))
        for name in ("route", "experts", "add_shared", "dot_rows", "widen"):
            getattr(library, name).argtypes = [_P]
        self._route: CFunction = library.route
        self._experts: CFunction = library.experts
        self._add_shared: CFunction = library.add_shared
        self._dot_rows: CFunction = library.dot_rows
        self._widen: CFunction = library.widen

    def route(
        self, logits: torch.Tensor, correction: torch.Tensor | None, rule: RuleOfRouter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each row and their weights, int64 and float32 [rows, top_k], the largest score first.

        Args:
            logits: float32 [rows, experts].
            correction: float32 [experts], added to the scores for the choice, or None.
            rule: how logits become weights.
        """
        rows, experts = logits.shape
        ids = logits.new_empty(rows, rule.top_k, dtype=torch.int64)
        weights = logits.new_empty(rows, rule.top_k)
        arguments = CRoute(
            logits.data_ptr(), pointer(correction), ids.data_ptr(), weights.data_ptr(), rows, experts, rule.top_k,
            rule.groups, rule.top_groups, 2 if rule.two_largest else 1, rule.scale, rule.jitter, SCORES[rule.scores],
            rule.renormalise,
        )  # fmt: skip
        self.kernels.run(self._route, arguments, logits, correction, ids, weights)
        return ids, weights

    def multiply(
        self, job: ExpertProducts, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the experts `ids` of each row of x [rows, hidden].

        Args:
            job: the experts.
            x: fp32 or bf16, contiguous.
            ids: int64 [rows, top_k], contiguous, as `shares`.
            shares: float32 [rows, top_k], the weights of the sums.
        """
        y = torch.empty_like(x)
        arguments = CExperts(
            ctypes.addressof(job.up), ctypes.addressof(job.down), x.data_ptr(), ids.data_ptr(), shares.data_ptr(),
            y.data_ptr(), ids.shape[0], ids.shape[1], len(job.up), job.first, job.coded, half(x),
            EXPERT_KINDS[job.kind], job.gated,
        )  # fmt: skip
        self.kernels.run(self._experts, arguments, job, x, ids, shares, y)
        return y

    def add_shared(self, x: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Return x + shared, or x + sigmoid(gate) * shared, for rows [rows, width] and a gate [rows, 1]."""
        y, (rows, width) = torch.empty_like(x), x.shape
        arguments = CShared(
            x.data_ptr(), shared.data_ptr(), pointer(gate), y.data_ptr(), rows, width, half(x)
        )
        self.kernels.run(self._add_shared, arguments, x, shared, gate, y)
        return y

    def dots(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the products [rows, 1] of rows x [rows, width] and one weight [1, width]."""
        y = x.new_empty(x.shape[0], 1)
        arguments = CShared(x.data_ptr(), weight.data_ptr(), None, y.data_ptr(), *x.shape, half(x))
        self.kernels.run(self._dot_rows, arguments, x, weight, y)
        return y

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows in bf16 as fp32."""
        y = x.new_empty(x.shape, dtype=torch.float32)
        arguments = CShared(x.data_ptr(), None, None, y.data_ptr(), *x.shape, 1)
        self.kernels.run(self._widen, arguments, x, y)
        return y


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The products of a layer's experts.

    Attributes:
        up: array of one CWeight or CCodedWeight per expert: gate | up if `gated`, else up.
        down: the same of the down projections.
        weights: the objects that the arrays point to.
        kind: key of `EXPERT_KINDS`.
        gated: whether experts have a gate.
        coded: whether weights are quantised.
        first: number of the first expert; others are skipped, as are those behind the last.
    """

    up: ctypes.Array[ctypes.Structure]
    down: ctypes.Array[ctypes.Structure]
    weights: object
    kind: str
    gated: bool
    coded: bool
    first: int = 0
