"""Random weights in every quantised form, for tests of products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch

from quire.quant.forms import Fp4Weight, Fp8Weight, Int8Weight, IntGroupWeight, QuantisedWeight


class WeightMaker:
    """Makes weights [outputs, inputs] with values of about 1, a row of zeros and a row of the largest codes."""

    def __init__(self, outputs: int, inputs: int, seed: int = 0) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.generator = torch.Generator().manual_seed(1000 * outputs + inputs + seed)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) + 0.5

    def codes(self, end: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=self.generator, dtype=torch.uint8)

    def fp8(self, block: bool, rounding: str = "none") -> Fp8Weight:
        values = torch.randn(self.outputs, self.inputs, generator=self.generator) * 100
        values[0], values[-1] = 0, 448
        shape = (-(-self.outputs // 128), -(-self.inputs // 128)) if block else (self.outputs, 1)
        scale = self.uniform(*shape) / 100
        static = torch.tensor(0.02) if rounding == "tensor" else None
        return Fp8Weight(values.clamp_(-448, 448).to(torch.float8_e4m3fn), scale, rounding, static)  # type: ignore[arg-type]

    def int8(self, rounding: str) -> Int8Weight:
        codes = self.codes(255, self.outputs, self.inputs).int() - 127
        codes[0], codes[-1] = 0, 127
        scale = self.uniform(self.outputs, 1) / 70
        scale[0] = 0
        return Int8Weight(codes.to(torch.int8), scale, rounding)  # type: ignore[arg-type]

    def groups(
        self,
        bits: int,
        group: int,
        kind: str = "",
        dtype: torch.dtype = torch.float16,
        permuted: bool = False,
    ) -> IntGroupWeight:
        """Make integers of 4 or 8 bits; `kind` is zero, offset or empty."""
        packed = self.codes(256, self.outputs, self.inputs * bits // 8)
        packed[-1] = 255
        groups = (self.outputs, self.inputs // group)
        scale = (self.uniform(*groups) / (1 << bits - 2)).to(dtype)
        zero = self.codes(1 << bits, *groups) if kind == "zero" else None
        offset = (-self.uniform(*groups) * 2).to(dtype) if kind == "offset" else None
        order = torch.randperm(self.inputs, generator=self.generator) if permuted else None
        return IntGroupWeight(packed, bits, scale, zero, offset, order)

    def fp4(self, group: int) -> Fp4Weight:
        packed = self.codes(256, self.outputs, self.inputs // 2)
        packed[0], packed[-1] = 0, 0x77
        groups = (self.outputs, self.inputs // group)
        if group == 32:
            return Fp4Weight(packed, self.codes(4, *groups) + 124)
        scale = (self.uniform(*groups) * 100).to(torch.float8_e4m3fn)
        return Fp4Weight(packed, scale, self.uniform(self.outputs, 1) / 200)


FORMS: dict[str, Callable[[WeightMaker], QuantisedWeight]] = {
    "fp8 rows": lambda make: make.fp8(False),
    "fp8 blocks": lambda make: make.fp8(True),
    "int8 rows": lambda make: make.int8("none"),
    "int8 rounded": lambda make: make.int8("token"),
    "int4 of 128": lambda make: make.groups(4, 128),
    "int4 of 64, bf16": lambda make: make.groups(4, 64, "", torch.bfloat16),
    "int4 of 32, zeros": lambda make: make.groups(4, 32, "zero"),
    "int4 of 128, zeros": lambda make: make.groups(4, 128, "zero"),
    "int4 of 32, offsets": lambda make: make.groups(4, 32, "offset", torch.float32),
    "int4, permuted": lambda make: make.groups(4, 128, "zero", permuted=True),
    "int4 of a row": lambda make: make.groups(4, make.inputs),
    "int8 of 32": lambda make: make.groups(8, 32),
    "int8 of 16, offsets": lambda make: make.groups(8, 16, "offset", torch.float32),
    "int8 of 128, zeros": lambda make: make.groups(8, 128, "zero"),
    "mxfp4": lambda make: make.fp4(32),
    "nvfp4": lambda make: make.fp4(16),
}


class LateWeights:
    """Weights of a checkpoint that threads still read: actions wait for `finish`."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []

    def when_loaded(self, action: Callable[[], None]) -> None:
        self._actions.append(action)

    def finish(self) -> None:
        for action in self._actions:
            action()


def memory_of(owner: Any) -> dict[str, tuple[int, ...]]:
    """Return address, strides and shape of the tensors that `owner` and the dataclasses in it hold, by their names."""
    names = vars(owner) if hasattr(owner, "__dict__") else owner.__dataclass_fields__
    found = {}
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, torch.Tensor):
            found[name] = (value.data_ptr(), *value.stride(), *value.shape)
        elif is_dataclass(value):
            found |= {f"{name}.{inner}": at for inner, at in memory_of(value).items()}
    return found
