"""Router and experts by the C kernels of a CPU. Steps that consist of these kernels are captured and replayed.

Import this module only if the kernels are `CpuKernels`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.kernels.cpu.codes import CCodedWeight
from quire.kernels.cpu.experts import EXPERT_KINDS, ExpertFunctions, ExpertProducts, RuleOfRouter
from quire.kernels.cpu.ops import CpuKernels
from quire.kernels.experts.choice import ExpertChoice
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.routing import Router, load_correction
from quire.layers.routing_params import Routing
from quire.quant.base import Matmul
from quire.quant.coded import CodedMatmul
from quire.quant.packed import FewRowsPackedMatmul

# Mean rows per expert up to which the kernels for few rows are faster than one product of the library per expert.
MOST_MEAN_ROWS = 8


class CRouter(Router):
    """A router whose rule is a kernel, and whose product is one too for few tokens."""

    def __init__(self, env: Env, kernels: CpuKernels, name: str, hidden: int, routing: Routing) -> None:
        precise = replace(env, dtype=torch.float32)
        self.logits = Linear(precise, name, hidden, routing.num_experts, routing.bias)
        self.correction = load_correction(env, name, routing)
        self.functions = ExpertFunctions(kernels)
        self.rule = RuleOfRouter(
            routing.top_k, routing.scores, routing.renormalise, routing.scale, routing.jitter, routing.groups,
            routing.top_groups, routing.group_score == "two_largest",
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> ExpertChoice:
        x = x.contiguous()
        wide = x if x.dtype == torch.float32 else self.functions.widen(x)
        return ExpertChoice(*self.functions.route(self.logits(wide).contiguous(), self.correction, self.rule))


class CExpertMLPs:
    """Experts that read each chosen weight once per step."""

    def __init__(self, functions: ExpertFunctions, products: ExpertProducts) -> None:
        self.functions, self.products = functions, products
        self.most_pairs = MOST_MEAN_ROWS * len(products.up)

    def takes(self, choice: ExpertChoice) -> bool:
        """Return whether these kernels are the fastest ones for the choice."""
        return choice.ids.numel() <= self.most_pairs

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """Return the weighted sums, [tokens, hidden] for x [tokens, hidden]."""
        return self.functions.multiply(
            self.products, x.contiguous(), choice.ids.contiguous(), choice.weights.contiguous()
        )


class FewRowsExperts:
    """Experts by C kernels while there are few rows per expert, and by `many` for more."""

    def __init__(self, few: CExpertMLPs, many: Experts) -> None:
        self.few, self.many = few, many

    @property
    def is_partial(self) -> bool:
        return self.many.is_partial

    def __call__(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        return (self.few if self.few.takes(choice) else self.many)(x, choice)


def c_expert_mlps(
    env: Env,
    up: Sequence[Matmul],
    down: Sequence[Matmul],
    activation: str,
    gated: bool,
) -> CExpertMLPs | None:
    """Return the experts by C kernels, or None if these do not take them.

    Args:
        env: device and kernels.
        up: product of each held expert's gate and up projections, or of its up projection without a gate.
        down: product of each expert's down projection.
        activation: key of `EXPERT_KINDS`; kernels do not take others.
        gated: whether experts have a gate.
    """
    if not isinstance(env.kernels, CpuKernels) or activation not in EXPERT_KINDS:
        return None
    arrays = [_array(products) for products in (up, down)]
    if arrays[0] is None or arrays[1] is None or arrays[0]._type_ is not arrays[1]._type_:
        return None
    coded = arrays[0]._type_ is CCodedWeight
    held = env.experts.held(env.experts.total) if env.experts.exchange else range(0)
    products = ExpertProducts(arrays[0], arrays[1], (up, down), activation, gated, coded, held.start)
    return CExpertMLPs(ExpertFunctions(env.kernels), products)


def _array(products: Sequence[Matmul]) -> ctypes.Array[Any] | None:
    """Return the structures of the products' weights, or None unless all have the same form."""
    structs: list[Any] = [
        product.plain for product in products if isinstance(product, FewRowsPackedMatmul | CodedMatmul)
    ]
    if len(structs) < len(products) or len({_form(struct) for struct in structs}) != 1:
        return None
    return (type(structs[0]) * len(structs))(*structs)  # type: ignore[no-any-return]


def _form(struct: ctypes.Structure) -> tuple[object, ...]:
    """Return what the weights of a layer's experts must have in common: all but the addresses."""
    fields = ((getattr(struct, field[0]), field[1] is ctypes.c_void_p) for field in struct._fields_)
    return type(struct), *(bool(value) if is_address else value for value, is_address in fields)
